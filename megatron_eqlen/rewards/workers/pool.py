"""A pool of grader processes that can be killed: no answer hangs a step, no crash reaches the trainer.

    submit ─► inbox ─► waiting, longest limit first ─► a worker ─► Future
              └──────────── a thread of the pool ─────────────┘

Workers answer in order, so a silence longer than an item's limit is caused by the first unanswered item: the
worker is killed, that item counts as timed out, and the rest goes to other workers.
"""

from __future__ import annotations

import contextlib
import heapq
import logging
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from itertools import count
from typing import Any

from megatron_eqlen.processes.watchdog import beat
from megatron_eqlen.rewards.workers.host import Item
from megatron_eqlen.rewards.workers.process import Job, Worker, WorkerHost

log = logging.getLogger(__name__)


class PoolEndedError(RuntimeError):
    """The pool was closed, or its host died: there will be no answer."""


class WorkerPool:
    """``workers`` processes that run ``MODULE.make_handler(**options)``, driven by a thread of the pool.

    Every item is answered: with what the handler returned, ``{"timeout": True}``, or ``{"failure": text}``;
    and always ``seconds``, the wall-clock time it took. A worker is sent up to ``batch`` items at once: that
    costs less for each, but they wait for one another.
    """

    def __init__(
        self, module: str, workers: int, options: dict[str, Any] | None = None, batch: int = 1
    ) -> None:
        self._size, self._batch = workers, batch
        self._numbers = count()
        self._lock = threading.Lock()
        self._inbox: deque[Job | None] = deque()
        """Jobs submitted; None: those before it are cut."""
        self._ended: BaseException | None = None
        """Why the pool takes no more jobs."""
        self._bell, self._rung = socket.socketpair()
        """Wakes the thread; the attributes below belong to the thread."""
        self._waiting: list[Job] = []
        """Heap of jobs that no worker has."""
        self._workers: list[Worker] = []
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._rung, selectors.EVENT_READ)
        for end in (self._bell, self._rung):
            end.setblocking(False)
        self._host = WorkerHost(module, options or {})
        self._thread = threading.Thread(target=self._run, daemon=True, name=module)
        self._thread.start()

    def submit(self, item: Item, seconds: float, wall_factor: float = 8.0, attempts: int = 1) -> Future[Item]:
        """Return a future of the item's answer.

        ``seconds`` is its limit: CPU time of the worker, and ``wall_factor`` times it on the wall clock; a
        factor of 1 makes it a limit on the wall clock alone. An item that times out or fails is tried
        ``attempts`` times. Raises PoolEndedError.
        """
        return self._submit([item], [seconds], wall_factor, attempts)[0]

    def map(
        self, items: Sequence[Item], seconds: Sequence[float] | float, wall_factor: float = 8.0
    ) -> list[Item]:
        """Wait for each item's answer, in order; ``seconds`` is the limit of all items or of each."""
        limits = [float(seconds)] * len(items) if isinstance(seconds, int | float) else list(seconds)
        return [answer.result() for answer in self._submit(items, limits, wall_factor, attempts=1)]

    def cut(self) -> None:
        """Cancel all submitted items; workers that run one are killed."""
        with contextlib.suppress(PoolEndedError):  # nothing is left to give up
            self._put([None])

    def close(self) -> None:
        """End the thread, the workers and their host. Items without an answer end with PoolEndedError."""
        with self._lock:
            self._ended = self._ended or PoolEndedError("the pool was closed")
        self._host.leave()
        self._ring()
        self._thread.join()
        for end in (self._selector, self._bell, self._rung, self._host):
            end.close()

    # ---- any thread ---------------------------------------------------------------------------------

    def _submit(
        self, items: Sequence[Item], limits: Sequence[float], wall_factor: float, attempts: int
    ) -> list[Future[Item]]:
        jobs = [
            Job(next(self._numbers), item, limit, wall_factor, attempts)
            for item, limit in zip(items, limits, strict=True)
        ]
        self._put(jobs)
        return [job.answer for job in jobs]

    def _put(self, jobs: Sequence[Job | None]) -> None:
        with self._lock:
            if self._ended is not None:
                raise PoolEndedError(str(self._ended)) from self._ended
            self._inbox.extend(jobs)
        self._ring()

    def _ring(self) -> None:
        with contextlib.suppress(BlockingIOError):  # the bell was rung often enough
            self._bell.send(b"!")

    # ---- the pool's thread --------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._ended is None:
                self._take()
                self._dispatch()
                self._collect()
        except BaseException as error:  # noqa: BLE001  it reaches those who wait for answers
            with self._lock:
                self._ended = self._ended or error
        self._take()
        for job in self._give_up():
            job.answer.set_exception(self._ended)
        for worker in list(self._workers):
            self._remove(worker)

    def _take(self) -> None:
        with self._lock:
            taken, self._inbox = self._inbox, deque()
        for job in taken:
            if job is not None:
                heapq.heappush(self._waiting, job)
                continue
            for cut in self._give_up():
                cut.answer.cancel()

    def _dispatch(self) -> None:
        for worker in self._idle():
            number = max(1, min(self._batch, len(self._waiting) // (4 * self._size)))
            worker.send([heapq.heappop(self._waiting) for _ in range(number)])

    def _idle(self) -> Iterator[Worker]:
        """Yield workers without a job, new ones up to the pool's size, as long as jobs wait."""
        for worker in self._workers:
            if self._waiting and not worker.pending:
                yield worker
        while self._waiting and len(self._workers) < self._size:
            worker = self._host.fork()
            self._workers.append(worker)
            self._selector.register(worker.connection, selectors.EVENT_READ, worker)
            yield worker

    def _collect(self) -> None:
        """Wait for the next answer, overrun or call."""
        deadline = min((worker.deadline for worker in self._workers if worker.pending), default=None)
        timeout = None if deadline is None else max(0.0, deadline - time.monotonic())
        ready = [key.data for key, _ in self._selector.select(timeout)]
        if self._ended is not None:
            return  # workers ended because their host did: no failure of theirs
        if None in ready:
            self._rung.recv(1 << 16)
        for worker in list(self._workers):
            if worker in ready:
                self._answer(worker, worker.receive())
            elif worker.pending and worker.overrun():
                self._answer(worker, {"timeout": True})

    def _answer(self, worker: Worker, answer: Item) -> None:
        """Answer the worker's first job. A worker that cannot continue is killed; its other jobs wait
        again."""
        beat()
        seconds = worker.seconds
        job = worker.pending.popleft() if worker.pending else None  # the worker may die without a job
        failed = "timeout" in answer or "failure" in answer
        if failed:
            self._remove(worker)
            for other in worker.pending:
                heapq.heappush(self._waiting, other)
        else:
            worker.begin()
        if job is not None:
            job.attempts -= 1
            if failed and job.attempts:
                log.warning("%s: %s; tried again", self._thread.name, answer)
                heapq.heappush(self._waiting, job)
            else:
                job.answer.set_result(answer | {"seconds": seconds})

    def _give_up(self) -> list[Job]:
        """Return all jobs without an answer; kill the workers that run one."""
        jobs, self._waiting = self._waiting, []
        for worker in [candidate for candidate in self._workers if candidate.pending]:
            self._remove(worker)
            jobs += worker.pending
        return jobs

    def _remove(self, worker: Worker) -> None:
        self._workers.remove(worker)
        self._selector.unregister(worker.connection)
        worker.kill()
