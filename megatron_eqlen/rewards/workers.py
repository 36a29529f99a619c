"""A pool of grader processes that can be killed: no answer hangs a step, no crash reaches the trainer.

Workers are forked from a clean host process (see worker_host), never from the trainer. They answer in order,
so a silence longer than an item's limit is caused by the first unanswered item: the worker is killed, that
item counts as timed out, and a new worker takes the rest.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_eqlen.rewards.worker_host import HEADER, Item, receive_message, send_message

PACKAGE_ROOT = Path(__file__).resolve().parents[2]
START_SECONDS = 300.0
"""The host imports SymPy and more; on a busy machine that takes a while."""
LARGEST_BATCH = 64
CLOCK_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass
class _Worker:
    connection: socket.socket
    pid: int
    pending: deque[int] = field(default_factory=deque)
    """Numbers of the items sent and not yet answered, in order."""
    since: float = 0.0
    """When the first of them started, ``time.monotonic()``, and the worker's CPU seconds then."""
    cpu: float = 0.0
    deadline: float = 0.0
    """When to check next whether the first item has used its limit."""

    def begin(self, limits: list[float]) -> None:
        """The clock of the first pending item starts."""
        self.since = time.monotonic()
        self.cpu = cpu_seconds(self.pid)
        self.deadline = self.since + (limits[self.pending[0]] if self.pending else 0.0)

    def overrun(self, limit: float, wall_factor: float) -> bool:
        """Whether the first pending item has used its limit. If not, sets the earliest time at which it could
        have."""
        now, used = time.monotonic(), cpu_seconds(self.pid) - self.cpu
        last = self.since + wall_factor * limit
        if now < self.deadline:
            return False
        if used >= limit or now >= last:
            return True
        self.deadline = min(last, now + max(limit - used, 0.05))
        return False


class WorkerPool:
    """``workers`` processes that run ``MODULE.make_handler(**options)``.

    ``map`` answers every item: what the handler returned, ``{"timeout": True}``, or ``{"failure": text}``;
    and always ``seconds``, the wall-clock time it took.
    """

    def __init__(self, module: str, workers: int, options: dict[str, Any] | None = None) -> None:
        self._size = workers
        self._workers: list[_Worker] = []
        self._control, theirs = socket.socketpair()
        self._control.settimeout(START_SECONDS)
        command = [sys.executable, "-P", "-m", "megatron_eqlen.rewards.worker_host"]
        with theirs:
            self._host = subprocess.Popen(
                [*command, module, json.dumps(options or {}), str(os.getpid())],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                env=scrubbed_environment(),
                cwd="/",
            )

    def map(
        self, items: Sequence[Item], seconds: Sequence[float] | float, wall_factor: float = 8.0
    ) -> list[Item]:
        """Each item's answer, in order.

        ``seconds`` is the limit of all items or of each: CPU time of the worker, and ``wall_factor`` times it
        on the wall clock; a factor of 1 makes it a limit on the wall clock alone.
        """
        limits = [float(seconds)] * len(items) if isinstance(seconds, int | float) else list(seconds)
        answers: dict[int, Item] = {}
        waiting = deque(range(len(items)))
        batch = max(1, min(LARGEST_BATCH, len(items) // (4 * self._size)))
        while len(self._workers) < min(self._size, len(items)):
            self._workers.append(self._spawn())
        while len(answers) < len(items):
            for worker in self._workers:
                if not worker.pending and waiting:
                    worker.pending.extend(waiting.popleft() for _ in range(min(batch, len(waiting))))
                    worker.begin(limits)
                    self._send(worker, items)
            self._collect(answers, waiting, limits, wall_factor)
        return [answers[number] for number in range(len(items))]

    def close(self) -> None:
        """End the workers and their host."""
        for worker in self._workers:
            self._kill(worker)
        self._workers.clear()
        self._control.close()
        self._host.wait()

    def _send(self, worker: _Worker, items: Sequence[Item]) -> None:
        with contextlib.suppress(BrokenPipeError):  # it died between batches; _collect notices
            send_message(worker.connection, [items[number] for number in worker.pending])

    def _collect(
        self, answers: dict[int, Item], waiting: deque[int], limits: list[float], wall_factor: float
    ) -> None:
        """Wait for the next answers or the next overrun."""
        busy = [worker for worker in self._workers if worker.pending]
        deadline = min(worker.deadline for worker in busy)
        with selectors.DefaultSelector() as selector:
            for worker in busy:
                selector.register(worker.connection, selectors.EVENT_READ, worker)
            ready = [key.data for key, _ in selector.select(max(0.0, deadline - time.monotonic()))]
        for worker in ready:
            self._receive(worker, answers, waiting, limits)
        for worker in busy:
            if worker not in ready and worker.overrun(limits[worker.pending[0]], wall_factor):
                seconds = time.monotonic() - worker.since
                answers[worker.pending[0]] = {"timeout": True, "seconds": seconds}
                self._replace(worker, waiting)

    def _receive(
        self, worker: _Worker, answers: dict[int, Item], waiting: deque[int], limits: list[float]
    ) -> None:
        try:
            answer = receive_message(worker.connection)
        except (EOFError, ConnectionResetError):
            answer = {"failure": "the worker died"}
        answers[worker.pending[0]] = answer | {"seconds": time.monotonic() - worker.since}
        if "failure" in answer:
            self._replace(worker, waiting)
            return
        worker.pending.popleft()
        worker.begin(limits)

    def _replace(self, worker: _Worker, waiting: deque[int]) -> None:
        """Start a new worker in place of one whose first pending item was answered for it; send the other
        items again."""
        self._kill(worker)
        waiting.extendleft(list(worker.pending)[:0:-1])
        self._workers[self._workers.index(worker)] = self._spawn()

    def _spawn(self) -> _Worker:
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                socket.send_fds(self._control, [b"+"], [theirs.fileno()])
            reply = self._control.recv(HEADER.size, socket.MSG_WAITALL)
        except (BrokenPipeError, ConnectionResetError):
            reply = b""
        if len(reply) < HEADER.size:
            raise RuntimeError(f"the grader host ended with status {self._host.wait()}: {self._host.args}")
        return _Worker(ours, HEADER.unpack(reply)[0])

    def _kill(self, worker: _Worker) -> None:
        worker.connection.close()
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker.pid, signal.SIGKILL)


def cpu_seconds(pid: int) -> float:
    """CPU time of a process so far, its own alone; 0 if it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    return (int(fields[11]) + int(fields[12])) / CLOCK_TICKS


def scrubbed_environment() -> dict[str, str]:
    """The part of the trainer's environment that a grader process may see: no token, no key, no rank."""
    return {
        "PATH": os.defpath,
        "LANG": "C.UTF-8",
        "PYTHONPATH": str(PACKAGE_ROOT),
        "PYTHONHASHSEED": "0",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }
