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
        except OSError:  # it has ended
            reply = b""
        if len(reply) < PID_BYTES:
            raise RuntimeError(f"the grader host ended with status {self._end()}: {self._process.args}")
        return Worker(Connection(ours.detach()), int.from_bytes(reply))

    def close(self) -> None:
        """End the host and its workers; a ``fork`` in another thread fails."""
        with contextlib.suppress(OSError):  # the host has ended
            self._control.shutdown(socket.SHUT_RDWR)
        self._end()
        self._control.close()

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

    def ask(self, item: Item, cpu_seconds: float, wall_seconds: float) -> Item:
        """Return the worker's answer and the ``seconds`` it took; ``timeout`` beyond one of its limits,
        ``failure`` if it died."""
        started = time.monotonic()
        try:
            self._connection.send_bytes(json.dumps([cpu_seconds, item]).encode())
            late = not self._connection.poll(wall_seconds)
            answer = {"timeout": True} if late else json.loads(self._connection.recv_bytes())
        except (EOFError, OSError):
            # the kernel kills it at its limit of processor time, which is at least as long on the clock
            late = time.monotonic() - started >= cpu_seconds
            answer = {"timeout": True} if late else {"failure": "the worker died"}
        return answer | {"seconds": time.monotonic() - started}

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self._connection.close()


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
