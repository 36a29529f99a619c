"""Weights over TCP: a socket to each replica, for the time of a sync.

    trainer  ──► POST update_weights     where to connect, and a nonce
    worker 0 ──► the nonce
    trainer  ──► frame: JSON [[name, dtype, shape], ...], then the bytes of these tensors one after the other
             ──► frame ...
             ──► frame of no tensors: that was all, or the trainer gave up
    worker 0 ──► done: everything is loaded
    server   ──► answer to the POST: by all of its workers

Worker 0 passes the tensors on to the other workers of its replica (``worker``). A connection without the
nonce comes from somebody else and is closed; one that ends earlier broke. Nothing here depends on vLLM.
"""

from __future__ import annotations

import asyncio
import json
import math
import secrets
import socket
import struct
from collections.abc import Coroutine, Iterable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import torch
from torch import Tensor

from megatron_eqlen.engines.replica import Replica, ReplicaPool

NamedTensors = list[tuple[str, Tensor]]
Frame = list[bytes | memoryview]
"""The parts of one message, in the order in which they are sent."""

BUCKET_BYTES = 64 * 2**20
"""Weights of a frame; a larger tensor goes alone."""
NONCE_BYTES = 16
LENGTH = struct.Struct("!I")
"""Format of a frame's length: the number of bytes of JSON that follow."""
DONE = b"done"
LAST_WORDS = 1.0
"""Seconds in which a server may report over HTTP why its worker hung up."""


# ---- the trainer's end -----------------------------------------------------------------------------------


class TcpSender:
    """Sends weights to the live replicas of ``pool``. A replica that fails is left out, the others get
    everything."""

    def __init__(self, pool: ReplicaPool, timeout: float) -> None:
        self.pool = pool
        self.timeout = timeout

    def send(self, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Send the weights; the next part is fetched while one is sent. Raises EngineError when no replica is
        left, and whatever ``named_tensors`` raises."""
        feeds = self.pool.each("waiting for its worker", lambda replica: invite(replica, self.timeout))
        sending: dict[Replica, Any] = {}
        try:
            try:
                for bucket in buckets(named_tensors, BUCKET_BYTES):
                    self.pool.settle("sending weights", sending)
                    frame = encode(bucket)
                    sending = self.pool.start(lambda replica, frame=frame: feeds[replica].send(frame))
            finally:  # the stream failed: the workers must not wait for more weights
                self.pool.settle("sending weights", sending)
                self.pool.each("update_weights", lambda replica: feeds[replica].finish())
        finally:
            for feed in feeds.values():
                self.pool.io.run(feed.close())


@dataclass
class Feed:
    """The connection to worker 0 of a replica.

    Every step raises OSError if the connection breaks, or the server's error if it reports one; ``close``
    must follow in any case.
    """

    worker: socket.socket
    answer: asyncio.Task[Any]
    """The POST to the server."""

    async def send(self, frame: Frame) -> None:
        for part in frame:
            await self._or_last_words(asyncio.get_running_loop().sock_sendall(self.worker, part))

    async def finish(self) -> None:
        """Wait until the workers have loaded everything that was sent."""
        await self.send(encode([]))
        await self._or_last_words(_read(self.worker, len(DONE)))
        await self.answer

    async def close(self) -> None:
        """Close the connection; a worker that still waits for weights fails."""
        self.worker.close()
        self.answer.cancel()
        await asyncio.gather(self.answer, return_exceptions=True)

    async def _or_last_words(self, step: Coroutine) -> None:
        """Await ``step``; if it fails, raise the server's error if there is one, else the connection's."""
        try:
            await step
        except OSError:
            with suppress(TimeoutError):
                await asyncio.wait_for(self.answer, LAST_WORDS)
            raise


async def invite(replica: Replica, timeout: float) -> Feed:
    """Ask for worker 0 and return its connection, on which it waits ``timeout`` seconds for each message.
    Raises OSError, or the server's error."""
    nonce = secrets.token_bytes(NONCE_BYTES)
    worker: asyncio.Future[socket.socket] = asyncio.get_running_loop().create_future()
    with await listen_towards(replica.url) as listener:
        host, port = listener.getsockname()[:2]
        address = {"host": host, "port": port, "nonce": nonce.hex(), "timeout": timeout}
        answer = asyncio.create_task(replica.post("update_weights", {"update_info": address}))
        reception = asyncio.create_task(_receive(listener, nonce, worker))
        try:
            await asyncio.wait({answer, worker}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not worker.done():
                answer.cancel()
            reception.cancel()
            await asyncio.wait({reception})
    if not worker.done():
        await answer  # raises the server's error
        raise ConnectionError("expected its worker to connect, found none")
    return Feed(worker.result(), answer)


async def _receive(listener: socket.socket, nonce: bytes, worker: asyncio.Future[socket.socket]) -> None:
    """Accept connections, each in a task of its own: a client that is not the worker may stay silent for
    ever."""
    async with asyncio.TaskGroup() as group:
        while True:
            sock, _ = await asyncio.get_running_loop().sock_accept(listener)
            group.create_task(_greet(sock, nonce, worker))


async def _greet(sock: socket.socket, nonce: bytes, worker: asyncio.Future[socket.socket]) -> None:
    """Keep the connection that sends the nonce; close any other."""
    with suppress(OSError), ExitStack() as stranger:
        stranger.enter_context(sock)
        if secrets.compare_digest(await _read(sock, NONCE_BYTES), nonce) and not worker.done():
            stranger.pop_all()
            worker.set_result(sock)


async def listen_towards(url: str) -> socket.socket:
    """Return a listening socket at the address by which this machine reaches ``url``, on a free port."""
    server = urlsplit(url)
    default_port = 443 if server.scheme == "https" else 80
    _, writer = await asyncio.open_connection(server.hostname, server.port or default_port)
    family = writer.get_extra_info("socket").family
    host = writer.get_extra_info("sockname")[0]
    writer.close()
    listener = socket.create_server((host, 0), family=family)
    listener.setblocking(False)
    return listener


async def _read(sock: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = await asyncio.get_running_loop().sock_recv(sock, count - len(data))
        if not part:
            raise ConnectionError("the worker hung up")
        data += part
    return data


def buckets(named_tensors: Iterable[tuple[str, Tensor]], limit: int) -> Iterator[NamedTensors]:
    """Group a stream of weights into parts of at most ``limit`` bytes, copied to the CPU if they are not
    there; a larger tensor is a part of its own."""
    part: NamedTensors = []
    size = 0
    for name, tensor in named_tensors:
        tensor = tensor.detach().cpu().contiguous()
        if part and size + tensor.nbytes > limit:
            yield part
            part, size = [], 0
        part.append((name, tensor))
        size += tensor.nbytes
    if part:
        yield part


def encode(named_tensors: NamedTensors) -> Frame:
    """Encode contiguous CPU tensors as a frame; their bytes are not copied."""
    header = [(name, str(t.dtype).removeprefix("torch."), t.shape) for name, t in named_tensors]
    text = json.dumps(header).encode()
    tensors = [t.reshape(-1).view(torch.uint8).numpy().data for _, t in named_tensors]
    return [LENGTH.pack(len(text)) + text, *tensors]


# ---- worker 0's end --------------------------------------------------------------------------------------


def connect(host: str, port: int, nonce: str, timeout: float) -> socket.socket:
    """Return worker 0's connection, which fails after ``timeout`` seconds of silence. Raises OSError."""
    sock = socket.create_connection((host, port), timeout)
    sock.sendall(bytes.fromhex(nonce))
    return sock


def receive(sock: socket.socket) -> Iterator[NamedTensors]:
    """Yield the weights, frame by frame. Asking for the next frame means that the last one is loaded. Raises
    OSError."""
    while header := _read_header(sock):
        yield [(name, _read_tensor(sock, getattr(torch, dtype), shape)) for name, dtype, shape in header]
    sock.sendall(DONE)


def _read_header(sock: socket.socket) -> list[tuple[str, str, list[int]]]:
    length = bytearray(LENGTH.size)
    _read_into(sock, memoryview(length))
    text = bytearray(LENGTH.unpack(length)[0])
    _read_into(sock, memoryview(text))
    return json.loads(text)


def _read_tensor(sock: socket.socket, dtype: torch.dtype, shape: list[int]) -> Tensor:
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size, np.uint8)  # NumPy asks the kernel for huge pages, PyTorch does not
    _read_into(sock, memory.data)
    return torch.from_numpy(memory).view(dtype).reshape(shape)


def _read_into(sock: socket.socket, rest: memoryview) -> None:
    while rest:
        received = sock.recv_into(rest)
        if not received:
            raise ConnectionError("the sender hung up in the middle of the weights")
        rest = rest[received:]
