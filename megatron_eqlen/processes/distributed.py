"""The ranks of a run: join and leave the world, agree, gather. NCCL with CUDA, gloo without.

Under torchrun or srun the ranks come from the environment (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT,
LOCAL_RANK). Without RANK the process is a world of its own. A default group that exists already is used.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

Item = TypeVar("Item")

HOST_PATIENCE = timedelta(days=7)
"""How long ranks wait for each other over ``host``: as long as servers generate. A rank that dies closes its
connections, which ends the wait at once."""

_host: dist.ProcessGroup | None = None


def join(timeout: timedelta = timedelta(minutes=30)) -> None:
    """Join the world, unless this process is in it already. ``timeout``: how long a collective may wait for a
    lost rank."""
    global _host
    if not dist.is_initialized():
        _join_world(timeout)
    _host = cast(dist.ProcessGroup, dist.new_group(backend="gloo", timeout=HOST_PATIENCE))


def host() -> dist.ProcessGroup | None:
    """All ranks, for plain objects: gloo on any machine, since NCCL would stage them on every GPU. None, the
    default group, in a world that ``join`` did not make."""
    return _host


def leave() -> None:
    """Leave the world and the groups made in it."""
    global _host
    _host = None
    dist.destroy_process_group()


def world_size() -> int:
    """Number of processes of this run, including those that a launcher started and that have not joined
    yet."""
    return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))


def is_rank0() -> bool:
    """Whether this process writes the run's files and prints."""
    return not dist.is_initialized() or dist.get_rank() == 0


_alone: ContextVar[bool] = ContextVar("alone", default=False)


@contextmanager
def alone() -> Iterator[None]:
    """Within the block this thread has no other ranks for ``agree`` and ``gather``. So a rank can do beside
    its training what else all ranks do together: only one thread of a process may use its groups."""
    token = _alone.set(True)
    try:
        yield
    finally:
        _alone.reset(token)


def is_alone() -> bool:
    return _alone.get()


def gather(items: list[Item]) -> list[Item]:
    """All ranks' items, in rank order, on every rank."""
    if is_alone():
        return list(items)
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, items, group=host())
    return [item for part in gathered for item in part]


def agree(ask: Callable[[], Item]) -> Item:
    """Rank 0's answer, on every rank. Only rank 0 asks: a file may appear between the looks of two ranks, and
    ranks that decide differently would wait for each other for ever."""
    if is_alone():
        return ask()
    box: list[Any] = [ask() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(box, src=0, group=host())
    return box[0]


def device() -> torch.device:
    """The device that holds this process's model."""
    return (
        torch.device("cuda", torch.cuda.current_device())
        if torch.cuda.is_available()
        else torch.device("cpu")
    )


def gpu_name() -> str | None:
    """What this process's GPU calls itself; None without one."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def _join_world(timeout: timedelta) -> None:
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend, timeout=timeout)
    else:
        store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage] (documented, not in __all__)
        dist.init_process_group(backend, timeout=timeout, store=store, rank=0, world_size=1)
