"""Weights over TCP: the messages between the trainer and a server's workers during a sync.

    worker  ──► hello: nonce, and for how many workers of its node it receives (``weight_relay``)
    trainer ──► frame: JSON [[name, dtype, shape], ...], then the bytes of these tensors one after the other
            ──► frame ...
            ──► frame of no tensors: that was all, or the trainer gave up
    worker  ──► done: everything is loaded, by all of them

A connection that ends earlier broke. Nothing here depends on vLLM.
"""

from __future__ import annotations

import json
import math
import socket
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

NamedTensors = list[tuple[str, Tensor]]
Frame = list[bytes | memoryview]
"""The parts of one message, in the order in which they are sent."""

NONCE_BYTES = 16
HELLO = struct.Struct(f"!{NONCE_BYTES}sI")
"""Format of the hello: nonce, number of workers."""
LENGTH = struct.Struct("!I")
"""Format of a frame's length: the number of bytes of JSON that follow."""
DONE = b"done"
ALIGNMENT = 64
"""Alignment in bytes of each tensor in the memory of a frame."""


@dataclass(frozen=True)
class Header:
    """Contents of a frame, and the place of each tensor in the memory that receives it."""

    text: bytes
    """JSON [[name, dtype, shape], ...]"""

    @cached_property
    def entries(self) -> list[tuple[str, torch.dtype, list[int]]]:
        return [(name, getattr(torch, dtype), shape) for name, dtype, shape in json.loads(self.text)]

    @cached_property
    def places(self) -> list[slice]:
        """Bytes of each tensor."""
        places, end = [], 0
        for _, dtype, shape in self.entries:
            start = -(-end // ALIGNMENT) * ALIGNMENT
            end = start + math.prod(shape) * dtype.itemsize
            places.append(slice(start, end))
        return places

    @property
    def size(self) -> int:
        """Bytes of memory for all tensors; at least 1, because nothing smaller can be mapped."""
        return max(1, self.places[-1].stop if self.places else 0)

    def tensors(self, memory: np.ndarray) -> NamedTensors:
        """Views of ``memory``, [size] uint8."""
        return [
            (name, torch.from_numpy(memory[place]).view(dtype).reshape(shape))
            for (name, dtype, shape), place in zip(self.entries, self.places, strict=True)
        ]


def connect(host: str, port: int, nonce: str, timeout: float, workers: int = 1) -> socket.socket:
    """Return a worker's connection, which fails after ``timeout`` seconds of silence. Raises OSError."""
    sock = socket.create_connection((host, port), timeout)
    sock.sendall(HELLO.pack(bytes.fromhex(nonce), workers))
    return sock


def receive(sock: socket.socket) -> Iterator[NamedTensors]:
    """Yield the weights, frame by frame. Asking for the next frame means that the last one is loaded. Raises
    OSError."""
    while (header := read_header(sock)).entries:
        memory = np.empty(header.size, np.uint8)  # NumPy asks the kernel for huge pages, PyTorch does not
        fill(sock, header, memory)
        yield header.tensors(memory)
    sock.sendall(DONE)


def read_header(sock: socket.socket) -> Header:
    """Return the next frame's header. Raises ConnectionError if the connection ends."""
    (length,) = LENGTH.unpack(read(sock, LENGTH.size))
    return Header(read(sock, length))


def fill(sock: socket.socket, header: Header, memory: np.ndarray) -> None:
    """Read a frame's tensors into ``memory``, [header.size] uint8."""
    for place in header.places:
        _read_into(sock, memory[place].data)


def read(sock: socket.socket, count: int) -> bytes:
    data = bytearray(count)
    _read_into(sock, memoryview(data))
    return bytes(data)


def _read_into(sock: socket.socket, rest: memoryview) -> None:
    while rest:
        received = sock.recv_into(rest)
        if not received:
            raise ConnectionError("the sender hung up in the middle of the weights")
        rest = rest[received:]


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
