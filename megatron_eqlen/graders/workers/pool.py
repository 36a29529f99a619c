"""A pool of grader processes that can be killed: no answer hangs a step, no crash reaches the trainer.

    submit ─► a thread of the pool, in order of submission ─► its worker ─► Future

Each thread drives one worker. A worker that is silent beyond an item's limit is killed, and the item counts
as timed out.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import Any

from megatron_eqlen.graders.workers.host import Item
from megatron_eqlen.graders.workers.process import WorkerHost
from megatron_eqlen.processes.watchdog import beat

log = logging.getLogger(__name__)


class WorkerPool:
    """``workers`` processes that run ``MODULE.make_handler(**options)``.

    Every item is answered: with what the handler returned, ``{"timeout": True}``, or ``{"failure": text}``.
    """

    def __init__(self, module: str, workers: int, options: dict[str, Any] | None = None) -> None:
        self._host = WorkerHost(module, options or {})
        self._threads = ThreadPoolExecutor(workers, module)
        self._own = threading.local()
        self._closed = False

    def submit(
        self,
        item: Item,
        seconds: float,
        read: Callable[[Item], Any] = dict,
        wall_factor: float = 8.0,
        attempts: int = 1,
    ) -> Future[Any]:
        """Return a future of ``read(answer)``; the answer has the number of ``seconds`` that it took, too.

        ``seconds`` is its limit: CPU time of the worker, and ``wall_factor`` times it on the wall clock; a
        factor of 1 makes it a limit on the wall clock alone. An item that times out or fails is tried
        ``attempts`` times. Raises RuntimeError if the pool is closed, the future also if the host has died.
        """
        return self._threads.submit(self._answer, item, (seconds, wall_factor * seconds), read, attempts)

    def map(self, items: Sequence[Item], seconds: float, wall_factor: float = 8.0) -> list[Item]:
        """Wait for each item's answer, in order."""
        results = [self.submit(item, seconds, wall_factor=wall_factor) for item in items]
        return [result.result() for result in results]

    def close(self) -> None:
        """End the workers, their host and the threads. Items without an answer are cancelled."""
        self._closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._host.close()
        self._threads.shutdown()

    def _answer(
        self, item: Item, limits: tuple[float, float], read: Callable[[Item], Any], attempts: int
    ) -> Any:
        """Ask this thread's worker, or a new one."""
        while True:
            try:
                if not hasattr(self._own, "worker"):
                    self._own.worker = self._host.fork()
                answer = self._own.worker.ask(item, *limits)
            finally:
                if self._closed:
                    raise CancelledError
            beat()
            attempts -= 1
            if "timeout" not in answer and "failure" not in answer:
                return read(answer)
            self._own.worker.kill()
            del self._own.worker
            if not attempts:
                return read(answer)
            log.warning("%s: %s; tried again", threading.current_thread().name, answer)
