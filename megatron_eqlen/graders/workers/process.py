"""The processes behind a pool: a clean host, and the workers that are forked from it.

The host imports a grader's module once (``host.py``); it is no fork of the trainer, so it has none of the
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
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from megatron_eqlen.graders.workers.host import PID_BYTES, Item

PACKAGE_ROOT = Path(__file__).resolve().parents[3]
START_SECONDS = 300.0
"""Seconds in which the host must have started: it imports SymPy and more, slowly on a busy machine."""
END_SECONDS = 5.0
"""Seconds after which a host that was told to end with its workers is killed; normally it takes no time."""
CLOCK_TICKS = os.sysconf("SC_CLK_TCK")
SHORTEST_WAIT = 0.05
"""Seconds between two looks at the processor time of a worker that has almost used its limit."""


class WorkerHost:
    """The process that workers of ``MODULE.make_handler(**options)`` are forked from."""

    def __init__(self, module: str, options: dict[str, Any]) -> None:
        self._control, theirs = socket.socketpair()
        self._control.settimeout(START_SECONDS)
        self._asking = threading.Lock()
        command = [sys.executable, "-P", "-m", "megatron_eqlen.graders.workers.host"]
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
            with self._asking, theirs:
                socket.send_fds(self._control, [b"+"], [theirs.fileno()])
                reply = self._control.recv(PID_BYTES, socket.MSG_WAITALL)
        except TimeoutError:
            raise RuntimeError(f"no worker in {START_SECONDS:.0f} s from {self._process.args}") from None
        except (BrokenPipeError, ConnectionResetError):
            reply = b""
        if len(reply) < PID_BYTES:
            raise RuntimeError(f"the grader host ended with status {self._end()}: {self._process.args}")
        return Worker(Connection(ours.detach()), int.from_bytes(reply))

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


class Worker:
    """A process that answers items, one at a time."""

    def __init__(self, connection: Connection, pid: int) -> None:
        self._connection, self.pid = connection, pid

    def ask(self, item: Item, seconds: float, wall_factor: float) -> Item:
        """Return the worker's answer and the ``seconds`` it took; ``timeout`` after ``seconds`` of its
        processor time or ``wall_factor`` times as long, ``failure`` if it died."""
        started = time.monotonic()
        answer = self._ask(item, seconds, started + wall_factor * seconds)
        return answer | {"seconds": time.monotonic() - started}

    def _ask(self, item: Item, seconds: float, deadline: float) -> Item:
        used_before = cpu_seconds(self.pid)
        try:
            self._connection.send_bytes(json.dumps(item).encode())
            wait = seconds
            while not self._connection.poll(wait):
                left = deadline - time.monotonic()
                cpu_left = seconds - (cpu_seconds(self.pid) - used_before)
                if min(left, cpu_left) <= 0:
                    return {"timeout": True}
                wait = min(left, max(cpu_left, SHORTEST_WAIT))
            return json.loads(self._connection.recv_bytes())
        except (EOFError, OSError):
            return {"failure": "the worker died"}

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def close(self) -> None:
        self._connection.close()


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
        "MALLOC_ARENA_MAX": "1",  # else each thread of a program reserves 64 MiB of its address space
    }
