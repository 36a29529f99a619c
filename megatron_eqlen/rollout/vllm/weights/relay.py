"""Weight relay: a sync's weights reach a node once, and all workers there read them from the same memory.

    trainer ──frame──► first worker of the node ──► memory of the node (memfd)
                                └── header and descriptor ──► its neighbours, who map that memory
                                                loaded ◄──┘

Nothing here depends on vLLM.
"""

from __future__ import annotations

import mmap
import os
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

import numpy as np

from megatron_eqlen.rollout.vllm.weights.stream import (
    DONE,
    LENGTH,
    Header,
    NamedTensors,
    connect,
    fill,
    read,
    read_header,
    receive,
)

MEETING = 30.0
"""Seconds that the workers of a node wait for each other; they are called at the same time."""
LOADED = b"+"
CREDENTIALS = struct.Struct("3i")
"""Format of the peer's credentials on a Unix socket: pid, uid, gid."""


def node_name() -> str:
    """Return a name that is the same in all processes that can share memory."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.stat('/proc/self/ns/net').st_ino}"


@dataclass(frozen=True)
class Neighbours:
    """A worker among the workers of its server."""

    rank: int
    nodes: Sequence[str]
    """``node_name`` of each rank."""

    @property
    def count(self) -> int:
        """Workers of this node, this one included."""
        return self.nodes.count(self.nodes[self.rank])

    @property
    def first(self) -> int:
        """Rank of the node's worker that the trainer sends to."""
        return self.nodes.index(self.nodes[self.rank])


def receive_on_node(
    neighbours: Neighbours, host: str, port: int, nonce: str, timeout: float
) -> Iterator[NamedTensors]:
    """Yield the weights, frame by frame, on each worker of the node. Asking for the next frame means that the
    last one is loaded. Raises OSError if the trainer or a neighbour hangs up or is silent for ``timeout``
    seconds."""
    meeting = f"\0eqlen-weights-{nonce}-{neighbours.first}"  # an abstract socket: it is gone with its process
    with ExitStack() as stack:
        if neighbours.rank != neighbours.first:
            first = stack.enter_context(_meet_first(meeting, timeout))
            yield from _receive_from_first(first)
            return
        others = _meet_others(stack, meeting, neighbours.count - 1, timeout)
        trainer = stack.enter_context(connect(host, port, nonce, timeout, neighbours.count))
        yield from _receive_for_all(trainer, others) if others else receive(trainer)


def _receive_for_all(trainer: socket.socket, others: list[socket.socket]) -> Iterator[NamedTensors]:
    while (header := read_header(trainer)).entries:
        with open(os.memfd_create("eqlen-weights"), "rb+", buffering=0) as memory:
            memory.truncate(header.size)
            fill(trainer, header, _mapped(memory, header.size, mmap.MAP_SHARED))
            for other in others:
                socket.send_fds(other, [LENGTH.pack(len(header.text))], [memory.fileno()])
                other.sendall(header.text)
            mine = _mapped(memory, header.size, mmap.MAP_PRIVATE)
        yield header.tensors(mine)
        for other in others:
            read(other, len(LOADED))
    for other in others:
        other.sendall(LENGTH.pack(0))
    trainer.sendall(DONE)


def _receive_from_first(first: socket.socket) -> Iterator[NamedTensors]:
    while True:
        begin, descriptors, _, _ = socket.recv_fds(first, LENGTH.size, 1)
        if not begin:
            raise ConnectionError("the first worker of the node hung up in the middle of the weights")
        (length,) = LENGTH.unpack(begin + read(first, LENGTH.size - len(begin)))
        if not length:
            return
        with open(descriptors[0], "rb+", buffering=0) as memory:
            header = Header(read(first, length))
            mine = _mapped(memory, header.size, mmap.MAP_PRIVATE)
        yield header.tensors(mine)
        first.sendall(LOADED)


def _mapped(memory: FileIO, size: int, flags: int) -> np.ndarray:
    """Return [size] uint8. The memory is freed when no process maps it any more; with ``MAP_PRIVATE`` writes
    are not seen by other processes."""
    return np.frombuffer(mmap.mmap(memory.fileno(), size, flags=flags), np.uint8)


# ---- meeting ---------------------------------------------------------------------------------------------


def _meet_others(stack: ExitStack, meeting: str, count: int, timeout: float) -> list[socket.socket]:
    """Return connections to the node's other workers."""
    deadline = time.monotonic() + MEETING
    found: list[socket.socket] = []
    if not count:
        return found
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(meeting)
        listener.listen()
        while len(found) < count:
            listener.settimeout(max(0.01, deadline - time.monotonic()))
            other = stack.enter_context(listener.accept()[0])
            if _same_user(other):
                other.settimeout(timeout)
                found.append(other)
    return found


def _meet_first(meeting: str, timeout: float) -> socket.socket:
    """Return a connection to the node's first worker, which may start listening a little later."""
    deadline = time.monotonic() + MEETING
    while time.monotonic() < deadline:
        sock = socket.socket(socket.AF_UNIX)
        with suppress(ConnectionRefusedError):  # nobody listens yet
            sock.connect(meeting)
            if _same_user(sock):
                sock.settimeout(timeout)
                return sock
        sock.close()
        time.sleep(0.01)
    raise ConnectionError(f"the first worker of the node did not come within {MEETING:g} s")


def _same_user(sock: socket.socket) -> bool:
    """Return True if the peer runs as this user: any process on the machine may know the address."""
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    return CREDENTIALS.unpack(credentials)[1] == os.getuid()
