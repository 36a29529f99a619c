"""A pool of grader processes that can be killed: no answer hangs a step, no crash reaches the trainer.

    submit ─► waiting, longest limit first ─► a thread of the pool ─► its worker ─► Future

Each thread drives one worker. A worker that is silent beyond an item's limit is killed, and the item counts
as timed out.
"""

from __future__ import annotations

import heapq
import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from megatron_eqlen.graders.workers.host import Item
from megatron_eqlen.graders.workers.process import Worker, WorkerHost
from megatron_eqlen.processes.watchdog import beat

log = logging.getLogger(__name__)


class PoolEndedError(RuntimeError):
    """The pool was closed, or its host died: there will be no answer."""


@dataclass(eq=False)
class Job:
    """An item that was submitted."""

    item: Item
    limit: float
    """Limit in seconds of the worker's CPU time, and ``wall_factor`` times it on the wall clock."""
    wall_factor: float
    attempts: int
    """Number of remaining attempts."""
    read: Callable[[Item], Any]
    result: Future[Any] = field(default_factory=Future)
    worker: Worker | None = None
    """The worker that has the item."""


class WorkerPool:
    """``workers`` processes that run ``MODULE.make_handler(**options)``.

    Every item is answered: with what the handler returned, ``{"timeout": True}``, or ``{"failure": text}``.
    The longest limit begins first, so that no long item runs alone at the end.
    """

    def __init__(self, module: str, workers: int, options: dict[str, Any] | None = None) -> None:
        self._numbers = count()
        self._changed = threading.Condition()
        """Guards the attributes below; notified when an item waits or the pool ends."""
        self._waiting: list[tuple[float, int, Job]] = []
        """Heap: equal limits in order of submission."""
        self._running: set[Job] = set()
        self._ended: BaseException | None = None
        """Why the pool takes no more items."""
        self._host = WorkerHost(module, options or {})
        self._threads = [
            threading.Thread(target=self._work, daemon=True, name=module) for _ in range(workers)
        ]
        for thread in self._threads:
            thread.start()

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
        ``attempts`` times. Raises PoolEndedError.
        """
        job = Job(item, seconds, wall_factor, attempts, read)
        with self._changed:
            if self._ended is not None:
                raise PoolEndedError(str(self._ended)) from self._ended
            self._queue(job)
        return job.result

    def map(self, items: Sequence[Item], seconds: float, wall_factor: float = 8.0) -> list[Item]:
        """Wait for each item's answer, in order."""
        results = [self.submit(item, seconds, wall_factor=wall_factor) for item in items]
        return [result.result() for result in results]

    def cut(self) -> None:
        """Cancel all submitted items; workers that run one are killed."""
        with self._changed:
            for job in self._give_up():
                job.result.cancel()

    def close(self) -> None:
        """End the threads, the workers and their host. Items without an answer end with PoolEndedError."""
        self._end(PoolEndedError("the pool was closed"))
        self._host.leave()
        for thread in self._threads:
            thread.join()
        self._host.close()

    def _end(self, why: BaseException) -> None:
        with self._changed:
            self._ended = self._ended or why
            for job in self._give_up():
                job.result.set_exception(self._ended)
            self._changed.notify_all()

    def _give_up(self) -> list[Job]:
        """Return all items without an answer; kill the workers that run one."""
        jobs = [job for _, _, job in self._waiting] + [job for job in self._running if not job.result.done()]
        self._waiting.clear()
        for job in self._running:
            if job.worker is not None:
                job.worker.kill()
                job.worker = None
        return jobs

    def _queue(self, job: Job) -> None:
        heapq.heappush(self._waiting, (-job.limit, next(self._numbers), job))
        self._changed.notify()

    # ---- a thread of the pool -----------------------------------------------------------------------

    def _work(self) -> None:
        worker: Worker | None = None
        try:
            while (job := self._take()) is not None:
                worker = worker or self._host.fork()
                if self._begin(job, worker):
                    answer = worker.ask(job.item, job.limit, job.wall_factor)
                    beat()
                    if not self._finish(job, answer):
                        worker.kill()
                        worker.close()
                        worker = None
        except BaseException as error:  # noqa: BLE001  it reaches those who wait for answers
            self._end(error)
        if worker is not None:
            worker.close()

    def _take(self) -> Job | None:
        """Return the next item once there is one; None when the pool has ended."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._ended)
            if self._ended:
                return None
            job = heapq.heappop(self._waiting)[-1]
            self._running.add(job)
            return job

    def _begin(self, job: Job, worker: Worker) -> bool:
        """Note which worker runs the item; return False if it was cut while the worker was forked."""
        with self._changed:
            if job.result.done():
                self._running.remove(job)
                return False
            job.worker = worker
            return True

    def _finish(self, job: Job, answer: Item) -> bool:
        """Hand the answer on, or let the item wait again; return True if its worker can go on."""
        failed = "timeout" in answer or "failure" in answer
        with self._changed:
            self._running.remove(job)
            job.attempts -= 1
            usable, job.worker = job.worker is not None and not failed, None
            if job.result.done():
                return usable  # the item was cut
            if failed and job.attempts:
                log.warning("%s: %s; tried again", threading.current_thread().name, answer)
                self._queue(job)
                return usable
        try:
            job.result.set_result(job.read(answer))
        except Exception as error:  # noqa: BLE001  it reaches the one who waits
            job.result.set_exception(error)
        return usable
