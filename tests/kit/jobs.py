"""Commands as users run them, in processes of their own, without each paying for its imports.

    job = start("-m", "megatron_eqlen.cli", "train", recipe)    # python -m megatron_eqlen.cli train ...
    job.kill()
    said = run("-m", "megatron_eqlen.cli", "plan", recipe).stdout

The processes are forked from one that has imported torch, Megatron and vLLM: see ``tests.kit.job_server``.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.kit import ROOT
from tests.kit.processes import adopt_orphans, within
from tools.benchmarks.servers import free_ports

LIMIT = 400.0
"""Seconds after which a job hangs."""


class Job:
    """A command that runs or has ended: a child of this process."""

    def __init__(self, arguments: Sequence[Any], environ: dict[str, str]) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="job-")
        self._status: int | None = None
        self.pid = _ask(
            arguments=list(map(str, arguments)),
            environ=os.environ | {"OMP_NUM_THREADS": "1"} | environ,
            folder=str(ROOT),
            stdout=f"{self._folder.name}/stdout",
            stderr=f"{self._folder.name}/stderr",
        )

    def poll(self) -> int | None:
        """Its exit status, negative if a signal ended it; None while it runs."""
        if self._status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._status = os.waitstatus_to_exitcode(status) if pid else None
        return self._status

    def wait(self) -> int:
        assert within(LIMIT, lambda: self.poll() is not None), f"it hangs: {self.stderr}"
        assert self._status is not None
        return self._status

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)
            self.wait()

    @property
    def stdout(self) -> str:
        return Path(self._folder.name, "stdout").read_text()

    @property
    def stderr(self) -> str:
        return Path(self._folder.name, "stderr").read_text()


def start(*arguments: Any, **environ: str) -> Job:
    """``python ARGUMENTS`` in the repository, where ``-m MODULE`` or a script's path comes first."""
    return Job(arguments, environ)


def start_ranks(count: int, *arguments: Any) -> list[Job]:
    """The same as the ranks of one world, as a launcher would start them."""
    port = str(*free_ports(1))
    world = {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return [
        start(*arguments, RANK=str(rank), LOCAL_RANK=str(rank), **world, **place) for rank in range(count)
    ]


def run(*arguments: Any, ranks: int = 1) -> Job:
    """Start it and wait until all ranks have ended well, or one has not; the job of rank 0."""
    jobs = [start(*arguments)] if ranks == 1 else start_ranks(ranks, *arguments)
    try:
        within(LIMIT, lambda: any(job.poll() for job in jobs) or all(job.poll() == 0 for job in jobs))
        for job in sorted(jobs, key=lambda job: not job.poll()):  # one that failed, before those that hang
            assert job.poll() == 0, f"status {job.poll()}: {job.stdout[-2000:]}{job.stderr[-4000:]}"
    finally:
        for job in jobs:
            job.kill()
    return jobs[0]


@functools.cache
def _server() -> subprocess.Popen:
    adopt_orphans()  # the jobs' parents end at once
    return subprocess.Popen(
        [sys.executable, "-m", "tests.kit.job_server"],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def _ask(**job: Any) -> int:
    server = _server()
    print(json.dumps(job), file=server.stdin, flush=True)
    answer = server.stdout.readline()
    assert answer, "the job server has died"
    return int(answer)


def stop_server() -> None:
    """At the end of all tests."""
    if _server.cache_info().currsize:
        _server().communicate()
        _server.cache_clear()
