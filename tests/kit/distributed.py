"""Run a function on N gloo ranks, each a process of its own, and collect what each returns.

    def add(value):                       # at the top level of a test module
        total = torch.tensor(value)
        dist.all_reduce(total)
        return total.item()

    assert run_ranks(2, add, 3) == [6, 6]

The ranks are forked from a process that has imported the heavy libraries and the function's module once
(``tests.kit.zygote``), so a call costs little more than its work. Results come back by pickle: return plain
data or tensors.
"""

from __future__ import annotations

import os
import pickle
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from typing import Any

from tests.kit.jobs import Child
from tests.kit.zygote import RANKS


def run_ranks(world_size: int, function: Callable[..., Any], *args: Any, timeout: float = 300.0) -> list[Any]:
    """``[function(*args) on rank 0, on rank 1, ...]``. The default process group is ready inside.

    Raises RuntimeError with the first failing rank's traceback. ``timeout``: seconds after which a hang
    counts as a failure.
    """
    with tempfile.TemporaryDirectory() as folder:
        store = f"file://{folder}/store"
        imports = (*RANKS, function.__module__)
        message = pickle.dumps((store, function, args))
        ranks = [_start(rank, world_size, imports, message) for rank in range(world_size)]
        try:
            return _collect([pipe for _, pipe in ranks], time.monotonic() + timeout)
        finally:
            for child, pipe in ranks:
                pipe.close()
                child.kill()


def _start(rank: int, world_size: int, imports: tuple[str, ...], message: bytes) -> tuple[Child, Connection]:
    """Start a rank; return it and the pipe that is its standard input and brings its answer."""
    place = {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(rank)}
    ours, theirs = socket.socketpair()
    with theirs:
        child = Child(["-m", "tests.kit.distributed"], place, [theirs.fileno(), 1, 2], imports)
    pipe = Connection(ours.detach())
    pipe.send_bytes(message)
    return child, pipe


def _collect(pipes: list[Connection], deadline: float) -> list[Any]:
    results: dict[Connection, Any] = {}
    while len(results) < len(pipes):
        waiting = [pipe for pipe in pipes if pipe not in results]
        ready = wait(waiting, timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise RuntimeError(f"ranks {[pipes.index(pipe) for pipe in waiting]} did not answer in time")
        for pipe in filter(ready.__contains__, waiting):
            results[pipe] = _answer(pipes.index(pipe), pipe)
    return [results[pipe] for pipe in pipes]


def _answer(rank: int, pipe: Connection) -> Any:
    try:
        failure, result = pickle.loads(pipe.recv_bytes())
    except EOFError:
        raise RuntimeError(f"rank {rank} died without an answer") from None
    if failure:
        raise RuntimeError(f"rank {rank} failed:\n{failure}")
    return result


def _rank_main(pipe: Connection) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        store, function, args = pickle.loads(pipe.recv_bytes())
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world_size)
        message = (None, function(*args))
    except BaseException:  # noqa: BLE001  whatever it is, the test must see it
        message = (traceback.format_exc(), None)
    pipe.send_bytes(pickle.dumps(message))
    sys.stdout.flush()
    with suppress(EOFError):  # peers may still be connecting to this rank: it stays until all have answered
        pipe.recv()
    os._exit(0)  # peers may be gone or stuck: no farewell from the process group


if __name__ == "__main__":
    _rank_main(Connection(0))
