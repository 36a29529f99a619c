"""A pool of grader processes that can be killed: no answer hangs a step, no crash reaches the trainer.

submit ─► a thread of the pool, in order of submission ─► its worker ─► Future
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

from megatron_eqlen.graders.workers.host import Item, scrubbed_environment
from megatron_eqlen.processes.watchdog import beat

log = logging.getLogger(__name__)

START_SECONDS = 300.0
"""Seconds in which the host must have started: it imports SymPy and more, slowly on a busy machine."""
END_SECONDS = 5.0
"""Seconds after which a host that was told to end is killed with its workers."""


class WorkerPool:
    """``workers`` processes that run ``MODULE.make_handler(**options)``. Every item is answered: with what
    the handler returned, ``{"timeout": True}``, or ``{"failure": text}``."""

    def __init__(self, module: str, workers: int, options: dict[str, Any] | None = None) -> None:
        self._threads = ThreadPoolExecutor(workers, module)
        # Each thread has a worker of its own.
        self._own = threading.local()
        self._closed = False
        self._control, theirs = socket.socketpair()
        command = [sys.executable, "-P", "-m", "megatron_eqlen.graders.workers.host"]
        with theirs:
            self._host = subprocess.Popen(
                [*command, module, json.dumps(options or {}), str(os.getpid())],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                env=scrubbed_environment(),
                cwd="/",
            )

    def submit(
        self,
        item: Item,
        seconds: float,
        read: Callable[[Item], Any] = dict,
        wall_factor: float = 8.0,
        attempts: int = 1,
    ) -> Future[Any]:
        """Return a future of ``read(answer)``; the answer also holds the ``seconds`` it took.

        ``seconds``: limit of the worker's CPU time; ``wall_factor`` times as many on the wall clock. A factor
        of 1 makes it a limit on the wall clock alone. An item that times out or fails is tried ``attempts``
        times. Raises RuntimeError if the pool is closed; the future raises it if the host has died.
        """
        return self._threads.submit(self._answer, item, (seconds, wall_factor * seconds), read, attempts)

    def map(self, items: Sequence[Item], seconds: float, wall_factor: float = 8.0) -> list[Item]:
        """Wait for each item's answer, in order."""
        results = [self.submit(item, seconds, wall_factor=wall_factor) for item in items]
        return [result.result() for result in results]

    def close(self) -> None:
        """End workers, host and threads; cancel items without an answer."""
        self._closed = True
        # First no new items, then the end of workers, which wakes the threads that wait for them.
        self._threads.shutdown(wait=False, cancel_futures=True)
        with contextlib.suppress(OSError):  # the host has ended
            self._control.shutdown(socket.SHUT_RDWR)
        self._end_host()
        self._control.close()
        self._threads.shutdown()

    def _answer(
        self, item: Item, limits: tuple[float, float], read: Callable[[Item], Any], attempts: int
    ) -> Any:
        while True:
            try:
                if not hasattr(self._own, "worker"):
                    self._own.worker = self._fork()
                answer = self._own.worker.ask(item, *limits)
            finally:
                # Once the pool is closed nothing counts, neither an answer nor an error.
                if self._closed:
                    raise CancelledError
            beat()
            attempts -= 1
            if "timeout" not in answer and "failure" not in answer:
                return read(answer)
            # It may still be at work: the next item gets a new worker.
            self._own.worker.kill()
            del self._own.worker
            if not attempts:
                return read(answer)
            log.warning("%s: %s; tried again", threading.current_thread().name, answer)

    def _fork(self) -> Worker:
        """Let the host fork a worker. Raises RuntimeError if the host has died or is silent."""
        ours, theirs = socket.socketpair()
        connection = Connection(ours.detach())
        try:
            with theirs:
                socket.send_fds(self._control, [b"+"], [theirs.fileno()])
            # The worker's first message is its number.
            if connection.poll(START_SECONDS):
                return Worker(connection, int(connection.recv_bytes()))
        except (EOFError, OSError):
            status = self._end_host()
            raise RuntimeError(f"the grader host ended with status {status}: {self._host.args}") from None
        raise RuntimeError(f"no worker in {START_SECONDS:.0f} s from {self._host.args}")

    def _end_host(self) -> int:
        """Return the status of the host, which was told to end; kill it and its workers if it is stopped."""
        try:
            return self._host.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._host.kill()
            return self._host.wait()


class Worker:
    def __init__(self, connection: Connection, pid: int) -> None:
        self._connection, self.pid = connection, pid

    def ask(self, item: Item, cpu_seconds: float, wall_seconds: float) -> Item:
        """Return the answer and the ``seconds`` it took; ``timeout`` at a limit, ``failure`` if it died."""
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
