"""The processes behind a pool: a clean host, and the workers that are forked from it.

The host imports a grader's module once (see worker_host); it is no fork of the trainer, so it has none of the
trainer's memory or environment.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_eqlen.rewards.workers.host import HEADER, Item, receive_message, send_message

PACKAGE_ROOT = Path(__file__).resolve().parents[3]
START_SECONDS = 300.0
"""Seconds in which the host must have started: it imports SymPy and more, slowly on a busy machine."""
END_SECONDS = 5.0
"""Seconds after which a host that was told to end with its workers is killed; normally it takes no time."""
CLOCK_TICKS = os.sysconf("SC_CLK_TCK")


class WorkerHost:
    """The process that workers of ``MODULE.make_handler(**options)`` are forked from."""

    def __init__(self, module: str, options: dict[str, Any]) -> None:
        self._control, theirs = socket.socketpair()
        self._control.settimeout(START_SECONDS)
        command = [sys.executable, "-P", "-m", "megatron_eqlen.rewards.workers.host"]
        with theirs:
            self._process = subprocess.Popen(
                [*command, module, json.dumps(options), str(os.getpid())],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                env=scrubbed_environment(),
                cwd="/",
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def fork(self) -> Worker:
        """Fork a new worker. Raises RuntimeError if the host has died or is silent."""
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                socket.send_fds(self._control, [b"+"], [theirs.fileno()])
            reply = self._control.recv(HEADER.size, socket.MSG_WAITALL)
        except TimeoutError:
            raise RuntimeError(f"no worker in {START_SECONDS:.0f} s from {self._process.args}") from None
        except (BrokenPipeError, ConnectionResetError):
            reply = b""
        if len(reply) < HEADER.size:
            raise RuntimeError(f"the grader host ended with status {self._end()}: {self._process.args}")
        return Worker(ours, HEADER.unpack(reply)[0])

    def leave(self) -> None:
        """Tell the host to end with its workers; a ``fork`` in another thread fails."""
        with contextlib.suppress(OSError):  # the host has ended
            self._control.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Wait until the host has ended."""
        self.leave()
        self._control.close()
        self._end()

    def _end(self) -> int:
        """Return the status of the host, which has been told to end. A stopped host does not hear this: it is
        killed, and the kernel kills its workers with it."""
        try:
            return self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()


@dataclass(order=True)
class Job:
    """An item that was submitted. Jobs sort by the order in which they are begun: the longest limit first, so
    that no long job runs alone at the end; equal ones in order of submission."""

    urgency: float = field(init=False)
    number: int
    item: Item = field(compare=False)
    limit: float = field(compare=False)
    """Limit in seconds of the worker's CPU time, and ``wall_factor`` times it on the wall clock."""
    wall_factor: float = field(compare=False)
    attempts: int = field(compare=False)
    """Number of remaining attempts."""
    answer: Future[Item] = field(init=False, compare=False, default_factory=Future)

    def __post_init__(self) -> None:
        self.urgency = -self.limit


class Worker:
    """A process that answers items in order, and the clock of the first unanswered job."""

    def __init__(self, connection: socket.socket, pid: int) -> None:
        self.connection, self.pid = connection, pid
        self.pending: deque[Job] = deque()
        """Jobs that were sent and not yet answered, in order."""
        self.deadline = 0.0
        """When to check next whether the first of them has used its limit, by ``time.monotonic()``."""
        self._since = self._cpu = 0.0
        """When the first job started, and the worker's CPU seconds then."""

    @property
    def seconds(self) -> float:
        """Seconds that the worker has spent on its first job."""
        return time.monotonic() - self._since

    def send(self, jobs: list[Job]) -> None:
        """Send jobs to a worker that has none."""
        self.pending.extend(jobs)
        self.begin()
        with contextlib.suppress(BrokenPipeError):  # the worker died between batches; receive notices
            send_message(self.connection, [job.item for job in jobs])

    def receive(self) -> Item:
        """Return the worker's next message."""
        try:
            return receive_message(self.connection)
        except (EOFError, ConnectionResetError):
            return {"failure": "the worker died"}

    def overrun(self) -> bool:
        """Return True if the first job has used its limit; otherwise set the earliest time at which it could
        have."""
        job = self.pending[0]
        now, used = time.monotonic(), cpu_seconds(self.pid) - self._cpu
        last = self._since + job.wall_factor * job.limit
        if now < self.deadline:
            return False
        if used >= job.limit or now >= last:
            return True
        self.deadline = min(last, now + max(job.limit - used, 0.05))
        return False

    def begin(self) -> None:
        """Start the clock of the first pending job."""
        self._since = time.monotonic()
        self._cpu = cpu_seconds(self.pid)
        self.deadline = self._since + (self.pending[0].limit if self.pending else 0.0)

    def kill(self) -> None:
        self.connection.close()
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process so far, without its children; 0 if it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    return (int(fields[11]) + int(fields[12])) / CLOCK_TICKS


def scrubbed_environment() -> dict[str, str]:
    """Return the part of the trainer's environment that a grader process may see: no token, no key, no
    rank."""
    return {
        "PATH": os.defpath,
        "LANG": "C.UTF-8",
        "PYTHONPATH": str(PACKAGE_ROOT),
        "PYTHONHASHSEED": "0",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }
