"""Sandboxes that wait for work, for callers in several threads."""

from __future__ import annotations

from collections.abc import Callable
from queue import Empty, LifoQueue

from megatron_eqlen.graders.sandbox.client import Sandbox, SandboxError

MOST_SANDBOXES = 3
"""Sandboxes that may fail at the same work, one after the other."""


class SandboxPool:
    """As many sandboxes as work at once. To be closed."""

    def __init__(self, make: Callable[[], Sandbox]) -> None:
        self._make = make
        self._idle: LifoQueue[Sandbox] = LifoQueue()
        self.started: list[Sandbox] = []

    def run[R](self, work: Callable[[Sandbox], R]) -> R:
        """Return the result of ``work`` in a sandbox that waits, or in a new one. Work whose sandbox was
        killed runs again. Raises SandboxError."""
        new = 0
        while True:
            try:
                sandbox = self._idle.get_nowait()
            except Empty:
                new += 1
                sandbox = self._make()
                self.started.append(sandbox)
            try:
                result = work(sandbox)
            except SandboxError:
                self.started.remove(sandbox)
                sandbox.close()
                if new == MOST_SANDBOXES:
                    raise
                continue
            self._idle.put(sandbox)
            return result

    def close(self) -> None:
        while self.started:
            self.started.pop().close()
