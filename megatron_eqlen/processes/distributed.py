"""Process group of a run: join and leave it, agree, gather, seal. NCCL with CUDA, gloo without.

Under torchrun or srun the ranks come from the environment (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT,
LOCAL_RANK); ``launch`` names a file at which they meet (``STORE``) instead of an address. Without RANK the
process is a world of size 1. An existing default group is used.

Objects are sealed (HMAC-SHA256, then the pickle) with the secret of their job: torch, Megatron and vLLM
unpickle what a connection brings, and gloo takes anybody's who connects while a group is made.
"""

from __future__ import annotations

import hmac
import os
import pickle
import resource
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import timedelta
from operator import itemgetter
from typing import IO, Any, cast

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from megatron_eqlen.types import Rollout

HOST_PATIENCE = timedelta(days=7)
"""Timeout of collectives over ``host``, as long as servers may generate. A dead rank ends a wait at once."""
STORE = "EQLEN_STORE"
"""Environment variable: the file at which the ranks of one machine meet."""
SECRET = "EQLEN_SECRET"
"""Environment variable: the secret, which launchers make and ranks inherit."""
SIZE = 32
"""Bytes of a seal."""
FILES = 65536
"""Open files that a rank may have, where the hard limit allows it."""

_host: dist.ProcessGroup | None = None


def join(timeout: timedelta = timedelta(minutes=30)) -> None:
    """Join the world, if not done yet. ``timeout``: how long a collective may wait for a lost rank."""
    global _host
    # each gloo group connects a rank with every other; the usual limit of open files is 1,024
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES if hard == resource.RLIM_INFINITY else min(hard, FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    if not dist.is_initialized():
        _join_world(timeout)
    _host = cast(dist.ProcessGroup, dist.new_group(backend="gloo", timeout=HOST_PATIENCE))


def host() -> dist.ProcessGroup | None:
    """Return the gloo group of all ranks, for plain objects; the default, None, if ``join`` made no world."""
    return _host


def leave() -> None:
    """Destroy the default group and all other groups, if ``join`` has made them."""
    global _host
    _host = None
    if dist.is_initialized():
        dist.destroy_process_group()


def world_size() -> int:
    """Return the number of processes of this run, including processes that have not joined yet."""
    return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))


def is_rank0() -> bool:
    """Return True on the rank that writes the run's files and prints."""
    return not dist.is_initialized() or dist.get_rank() == 0


_alone: ContextVar[bool] = ContextVar("alone", default=False)


@contextmanager
def alone() -> Iterator[None]:
    """Make ``agree`` and ``gather`` local to this thread in the block, so that it can run collective code
    beside training: only one thread of a process may use its groups."""
    token = _alone.set(True)
    try:
        yield
    finally:
        _alone.reset(token)


def is_alone() -> bool:
    return _alone.get()


def gather[Item](items: list[Item]) -> list[Item]:
    """Return all ranks' items, in rank order, on every rank; ``items`` where there is one."""
    if is_alone() or not dist.is_initialized():
        return list(items)
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, items, group=host())
    return [item for part in gathered for item in part]


def at_homes[Item](rollouts: Sequence[Rollout], of: Callable[[Rollout], Item]) -> list[Item]:
    """Return ``of`` each rollout, which its home alone computes, on every rank. Collective."""
    rank = dist.get_rank() if dist.is_initialized() else None
    own = [(number, of(rollout)) for number, rollout in enumerate(rollouts) if rollout.is_at(rank)]
    return [value for _, value in sorted(gather(own), key=itemgetter(0))]


def agree[Item](ask: Callable[[], Item]) -> Item:
    """Return rank 0's ``ask()`` on every rank: ranks that see different files would decide differently."""
    if is_alone():
        return ask()
    box: list[Any] = [ask() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(box, src=0, group=host())
    return box[0]


def device() -> torch.device:
    cuda = torch.cuda.is_available()
    return torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")


def _join_world(timeout: timedelta) -> None:
    if torch.cuda.is_available():
        # Before NCCL starts: it takes the current device.
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    ranks, here = (int(os.environ.get(name, "1")) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    if ranks == here:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # by default gloo listens where the machine's name points
    seal(required=ranks != here)
    # torchrun or srun started this rank: ranks meet at MASTER_ADDR.
    if "RANK" in os.environ and STORE not in os.environ:
        dist.init_process_group(backend, timeout=timeout)
        return
    # ``launch`` named a file to meet at; a process alone needs no place.
    stores: Any = dist  # documented there, not in __all__
    store = stores.FileStore(os.environ[STORE]) if STORE in os.environ else stores.HashStore()
    rank = int(os.environ.get("RANK", "0"))
    dist.init_process_group(backend, timeout=timeout, store=store, rank=rank, world_size=ranks)


class SealError(ConnectionError):
    """A message of somebody who does not have the secret."""


def seal(required: bool = False) -> None:
    """Seal collectives if the environment has a secret. Raises ValueError if it is required and missing."""
    if SECRET in os.environ:
        # torch's collectives of objects look their pickler up by these two names.
        module: Any = distributed_c10d
        module._pickler, module._unpickler = _Sealing, _Opening
    elif required:
        remedy = f"export {SECRET}=..., the same on each, as slurm/train.sbatch does"
        expected = "a secret in the environment of all nodes' ranks"
        raise ValueError(f"{SECRET}: expected {expected}, found none: {remedy}")


def _digest(body: bytes | memoryview) -> bytes:
    return hmac.digest(os.environ[SECRET].encode(), body, "sha256")


class _Sealing:
    """Stands for ``pickle.Pickler``."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file = file

    def dump(self, item: Any) -> None:
        body = pickle.dumps(item)
        self.file.write(_digest(body) + body)


class _Opening:
    """Stands for ``pickle.Unpickler``. Raises SealError before anything is unpickled."""

    def __init__(self, file: IO[bytes]) -> None:
        self.data = file.read()

    def load(self) -> Any:
        body = memoryview(self.data)[SIZE:]
        if not hmac.compare_digest(self.data[:SIZE], _digest(body)):
            raise SealError("an object of another rank: expected the seal of this job, found another")
        return pickle.loads(body)
