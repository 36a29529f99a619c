"""Calls of environments beside generation, in threads.

start ──► waiting ──► a thread each, ``Conversations.workers`` at once ──► finished, or failed
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from queue import Empty, SimpleQueue

from megatron_eqlen.environments.conversation import Answer
from megatron_eqlen.sampling.track import Track
from megatron_eqlen.types import RolloutKey

POLL_SECONDS = 0.05


@dataclass(eq=False)
class Call:
    """A turn that an environment answers."""

    key: RolloutKey
    track: Track
    turns: int
    """Turns of the response so far, with the one that is answered."""
    work: Callable[[], Answer]
    result: Answer | None = None
    error: BaseException | None = None
    started: float = 0.0
    ended: float = 0.0


class Calls:
    """Runs calls in daemon threads: one that never returns does not keep the process alive."""

    def __init__(self, workers: int, timeout: float) -> None:
        self.workers, self.timeout = workers, timeout
        self.waiting: deque[Call] = deque()
        self.running: list[Call] = []
        self._ended: SimpleQueue[Call] = SimpleQueue()

    def __len__(self) -> int:
        """Return the number of calls that are not finished."""
        return len(self.waiting) + len(self.running)

    def start(self, call: Call) -> None:
        self.waiting.append(call)
        self._admit()

    def finished(self, wait: bool) -> list[Call]:
        """Return calls that have ended, or taken too long, which is a failure. ``wait``: there is nothing
        else to do."""
        ended: list[Call] = []
        while True:
            try:
                ended.append(self._ended.get(timeout=POLL_SECONDS if wait and not ended else 0))
            except Empty:
                break
        now = time.monotonic()
        for call in self.running:
            if call not in ended and now - call.started > self.timeout:
                call.error = TimeoutError(f"no answer in {self.timeout:g} s (environment.timeout)")
                call.ended = now
                ended.append(call)
        ended = [call for call in ended if call in self.running]  # not one that was given up before
        self.running = [call for call in self.running if call not in ended]
        self._admit()
        return ended

    def forget(self, key: RolloutKey) -> None:
        """Give up the calls of a rollout."""
        self.waiting = deque(call for call in self.waiting if call.key != key)
        self.running = [call for call in self.running if call.key != key]

    def _admit(self) -> None:
        while self.waiting and len(self.running) < self.workers:
            call = self.waiting.popleft()
            call.started = time.monotonic()
            self.running.append(call)
            threading.Thread(target=self._run, args=(call,), name="environment", daemon=True).start()

    def _run(self, call: Call) -> None:
        try:
            call.result = call.work()
        except BaseException as error:  # noqa: BLE001  another's code: the driver drops the rollout
            call.error = error
        call.ended = time.monotonic()
        self._ended.put(call)
