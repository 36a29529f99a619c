"""Weights reach a node once, and every worker of it has the same bits. (Workers are threads here, on
pretended nodes.)"""

from __future__ import annotations

import gc
import os
import secrets
import socket
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import torch

from megatron_eqlen.rollout.vllm.weights import relay as weight_relay
from megatron_eqlen.rollout.vllm.weights.relay import Neighbours, receive_on_node
from megatron_eqlen.rollout.vllm.weights.stream import DONE, HELLO, NamedTensors, encode, read

FRAMES = [
    [("a", torch.arange(7, dtype=torch.bfloat16)), ("b", torch.tensor(2.5)), ("c", torch.ones(3, 5))],
    [("d", torch.arange(3, dtype=torch.uint8)), ("e", torch.tensor([[1.5], [float("nan")]]))],
    [("none", torch.zeros(0, 4))],
]


class Trainer:
    """Accepts workers and sends the same to all of them."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.nonce = secrets.token_bytes(16)
        self.invitation = {
            "host": "127.0.0.1",
            "port": self.listener.getsockname()[1],
            "nonce": self.nonce.hex(),
            "timeout": 10.0,
        }

    def accept(self, workers: int) -> list[socket.socket]:
        """Return connections that stand for ``workers`` workers."""
        connections, reached = [], 0
        while reached < workers:
            connections.append(self.listener.accept()[0])
            nonce, count = HELLO.unpack(read(connections[-1], HELLO.size))
            assert nonce == self.nonce
            reached += count
        assert reached == workers
        return connections

    def send(self, connections: list[socket.socket], frame: NamedTensors) -> None:
        for connection in connections:
            for part in encode(frame):
                connection.sendall(part)


@pytest.fixture
def trainer() -> Iterator[Trainer]:
    before = open_descriptors()
    made = Trainer()
    yield made
    made.listener.close()
    gc.collect()  # frames that raised
    assert open_descriptors() == before, "memory or sockets are left open"


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def start(pool: ThreadPoolExecutor, nodes: list[str], trainer: Trainer) -> list[Future[list[NamedTensors]]]:
    def work(rank: int) -> list[NamedTensors]:
        frames = []
        for frame in receive_on_node(Neighbours(rank, nodes), **trainer.invitation):
            frames.append([(name, tensor.clone()) for name, tensor in frame])
            for _, tensor in frame:
                tensor.zero_()  # nobody else must see this
        return frames

    return [pool.submit(work, rank) for rank in reversed(range(len(nodes)))]  # the first comes last


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize(
    ("nodes", "connections"), [("a", 1), ("aa", 1), ("aaaaaaaa", 1), ("ab", 2), ("abab", 2), ("aabbbc", 3)]
)
def test_a_node_is_sent_the_weights_once_and_all_its_workers_have_them(trainer, nodes, connections):
    with ThreadPoolExecutor(len(nodes)) as pool:
        workers = start(pool, list(nodes), trainer)
        sockets = trainer.accept(len(nodes))
        assert len(sockets) == connections
        for frame in [*FRAMES, []]:
            trainer.send(sockets, frame)
        assert [read(sock, len(DONE)) for sock in sockets] == [DONE] * connections
        for worker in workers:
            for found, sent in zip(worker.result(), FRAMES, strict=True):
                for (name, tensor), (expected_name, expected) in zip(found, sent, strict=True):
                    assert (name, tensor.shape) == (expected_name, expected.shape)
                    assert tensor.dtype == expected.dtype
                    assert bits(tensor) == bits(expected)
        for sock in sockets:
            sock.close()


def test_whoever_breaks_off_nobody_waits(trainer):
    """Cases: the trainer, in the middle of a frame; the first worker; its neighbour."""
    for culprit in ("trainer", "first", "neighbour"):
        with ThreadPoolExecutor(2) as pool:

            def work(rank: int, culprit: str = culprit) -> int:
                frames = 0
                for _ in receive_on_node(Neighbours(rank, "aa"), **trainer.invitation):
                    frames += 1
                    if (culprit, rank) in (("first", 0), ("neighbour", 1)):
                        return frames
                return frames

            workers = [pool.submit(work, rank) for rank in range(2)]
            (connection,) = trainer.accept(2)
            trainer.send([connection], FRAMES[0])
            if culprit == "trainer":
                connection.sendall(encode(FRAMES[1])[0])
                connection.close()
            for rank, worker in enumerate(workers):
                if (culprit, rank) in (("first", 0), ("neighbour", 1)):
                    assert worker.result() == 1
                else:
                    with pytest.raises(ConnectionError):
                        worker.result()
            if culprit != "trainer":
                assert connection.recv(1) == b"", "the trainer sees that it is over"
                connection.close()


def test_a_neighbour_that_does_not_come_is_an_error(trainer, monkeypatch):
    monkeypatch.setattr(weight_relay, "MEETING", 0.05)
    for rank in range(2):
        with pytest.raises(OSError, match=r"did not come within 0.05 s|timed out"):
            next(receive_on_node(Neighbours(rank, "aa"), **trainer.invitation))
