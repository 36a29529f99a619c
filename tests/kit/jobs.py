"""Commands as users run them, in processes of their own, without each paying for its imports.

    job = start("-m", "megatron_eqlen.cli", "train", recipe)    # python -m megatron_eqlen.cli train ...
    job.kill()
    said = run("-m", "megatron_eqlen.cli", "plan", recipe).stdout

The processes are forked from one that has imported torch, Megatron and vLLM: see ``tests.kit.zygote``.
"""

from __future__ import annotations

import functools
import os
import signal
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.kit import ROOT
from tests.kit.processes import within
from tests.kit.zygote import JOBS, Zygote

ONE_CORE = {"OMP_NUM_THREADS": "1", "SLURM_CPUS_PER_TASK": "1"}
"""Environment for one thread: more threads, of an optimizer's updates for example, would wait for cores that
other tests use."""
LIMIT = 400.0
"""Seconds after which a job counts as hanging."""


class Child:
    """A process that the zygote has forked for this one; it may have ended."""

    def __init__(
        self, arguments: Sequence[Any], environ: dict[str, str], files: Sequence[int], imports: Sequence[str]
    ) -> None:
        self._status: int | None = None
        environ = os.environ | ONE_CORE | environ
        self.pid = _zygote().fork([*map(str, arguments)], environ, str(ROOT), files, imports)

    def poll(self) -> int | None:
        """Return its exit status, negative if a signal ended it; None while it runs."""
        return self._reap(os.WNOHANG)

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)
            self._reap(0)

    def _reap(self, how: int) -> int | None:
        if self._status is None:
            pid, status = os.waitpid(self.pid, how)
            self._status = os.waitstatus_to_exitcode(status) if pid else None
        return self._status


class Job(Child):
    """A command whose output goes to files."""

    def __init__(self, arguments: Sequence[Any], environ: dict[str, str]) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="job-")
        paths = [os.devnull, f"{self._folder.name}/stdout", f"{self._folder.name}/stderr"]
        files = [os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND) for path in paths]
        try:
            super().__init__(arguments, environ, files, JOBS)
        finally:
            for file in files:
                os.close(file)

    def wait(self) -> int:
        assert within(LIMIT, lambda: self.poll() is not None), f"it hangs: {self.stderr}"
        assert self._status is not None
        return self._status

    @property
    def stdout(self) -> str:
        return Path(self._folder.name, "stdout").read_text()

    @property
    def stderr(self) -> str:
        return Path(self._folder.name, "stderr").read_text()


def start(*arguments: Any, **environ: str) -> Job:
    """Start ``python ARGUMENTS`` in the repository, where ``-m MODULE`` or a script's path comes first."""
    return Job(arguments, environ)


class Ranks(list[Job]):
    """The jobs of one world. They meet at a store in this process, as torchrun's do: a port that is looked
    for here and bound by rank 0 might be another's by then."""

    def __init__(self, count: int, arguments: Sequence[Any], environ: dict[str, str]) -> None:
        from torch.distributed import TCPStore  # not every test that starts jobs needs torch

        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        world = {
            "WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._store.port), "TORCHELASTIC_USE_AGENT_STORE": "True",
        }  # fmt: skip
        super().__init__(
            start(*arguments, RANK=str(rank), LOCAL_RANK=str(rank), **world | environ)
            for rank in range(count)
        )

    def wait(self) -> list[int]:
        """Wait for the ranks; return their exit statuses."""
        ended = within(LIMIT, lambda: all(job.poll() is not None for job in self))
        assert ended, f"it hangs: {[(job.poll(), job.stderr) for job in self]}"
        return [job.wait() for job in self]


def start_ranks(count: int, *arguments: Any, **environ: str) -> Ranks:
    """Start the ranks of one world, as a launcher would start them."""
    return Ranks(count, arguments, environ)


def run(*arguments: Any, ranks: int = 1, **environ: str) -> Job:
    """Start a job and wait until all ranks have ended well, or one has not; return the job of rank 0."""
    jobs = [start(*arguments, **environ)] if ranks == 1 else start_ranks(ranks, *arguments, **environ)
    try:
        within(LIMIT, lambda: any(job.poll() for job in jobs) or all(job.poll() == 0 for job in jobs))
        for job in sorted(jobs, key=lambda job: not job.poll()):  # one that failed, before those that hang
            assert job.poll() == 0, f"status {job.poll()}: {job.stdout[-2000:]}{job.stderr[-4000:]}"
    finally:
        for job in jobs:
            job.kill()
    return jobs[0]


def forked_python(path: Path) -> Path:
    """Write a program that a job can take for ``sys.executable``: what it starts is forked, too. Its status
    is 0, however that ends."""
    path.write_text(f'#!/bin/sh\nexec {_zygote().python} "$@"\n')
    path.chmod(0o755)
    return path


@functools.cache
def _zygote() -> Zygote:
    return Zygote.inherited or Zygote.spawn()


def stop_zygote() -> None:
    """Stop the zygote; called at the end of all tests."""
    if Zygote.inherited or _zygote.cache_info().currsize:
        _zygote().stop()
        _zygote.cache_clear()
