"""Weights over TCP: what the trainer and a server's workers say to each other during a sync.

    worker  ──► hello: nonce, rank
    trainer ──► frame: JSON [[name, dtype, shape], ...], then the bytes of these tensors one after the other
            ──► frame ...
            ──► frame of no tensors: that was all, or the trainer gave up
    worker  ──► done: everything is loaded

A connection that ends earlier broke. Nothing here depends on vLLM.
"""

from __future__ import annotations

import json
import math
import socket
import struct
from collections.abc import Iterable, Iterator

import numpy as np
import torch
from torch import Tensor

NamedTensors = list[tuple[str, Tensor]]
Frame = list[bytes | memoryview]
"""The parts of one message, in the order in which they are sent."""

NONCE_BYTES = 16
HELLO = struct.Struct(f"!{NONCE_BYTES}sI")
"""Format of the hello: nonce and rank."""
LENGTH = struct.Struct("!I")
"""Format of a frame's length: the number of bytes of JSON that follow."""
DONE = b"done"


def connect(host: str, port: int, nonce: str, timeout: float, rank: int) -> socket.socket:
    """A worker's connection, which fails after ``timeout`` seconds of silence. Raises OSError."""
    sock = socket.create_connection((host, port), timeout)
    sock.sendall(HELLO.pack(bytes.fromhex(nonce), rank))
    return sock


def receive(sock: socket.socket) -> Iterator[NamedTensors]:
    """The weights, frame by frame. Asking for the next frame means that the last one is loaded. Raises
    OSError."""
    while named_tensors := read_frame(sock):
        yield named_tensors
    sock.sendall(DONE)


def read_frame(sock: socket.socket) -> NamedTensors:
    """The next frame's tensors, each in its own memory: vLLM keeps a layer's tensors until the layer is
    complete, which may be some frames later. Raises ConnectionError where the connection ends."""
    (length,) = LENGTH.unpack(_read(sock, LENGTH.size).data)
    header = json.loads(_read(sock, length).tobytes())
    return [(name, _read_tensor(sock, getattr(torch, dtype), shape)) for name, dtype, shape in header]


def _read_tensor(sock: socket.socket, dtype: torch.dtype, shape: list[int]) -> Tensor:
    return torch.from_numpy(_read(sock, math.prod(shape) * dtype.itemsize)).view(dtype).reshape(shape)


def _read(sock: socket.socket, count: int) -> np.ndarray:
    """[count] uint8. (NumPy asks the kernel for huge pages, PyTorch does not.)"""
    buffer = np.empty(count, np.uint8)
    rest = buffer.data
    while rest:
        received = sock.recv_into(rest)
        if not received:
            raise ConnectionError("the trainer hung up in the middle of the weights")
        rest = rest[received:]
    return buffer


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
    """Contiguous CPU tensors as a frame; their bytes are not copied."""
    header = [(name, str(t.dtype).removeprefix("torch."), t.shape) for name, t in named_tensors]
    text = json.dumps(header).encode()
    tensors = [t.reshape(-1).view(torch.uint8).numpy().data for _, t in named_tensors]
    return [LENGTH.pack(len(text)) + text, *tensors]
