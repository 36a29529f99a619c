"""Who worked when: the stages of a run as spans of time, and what engine and trainer were idle."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

ENGINE = ("harvest", "evaluate")
TRAINER = ("trees", "unpark", "train", "park", "sync", "checkpoint")
"""Stages in which each of the two works; graders work beside both."""


@dataclass
class Span:
    """A stage from ``began`` to ``ended``, in seconds of ``time.perf_counter``."""

    stage: str
    began: float
    ended: float = math.inf
    """Infinite while it goes on."""


class Timeline:
    """The spans of this process. Several threads may add to it."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self._epoch = time.time() - time.perf_counter()

    @contextmanager
    def span(self, stage: str) -> Iterator[Span]:
        span = Span(stage, time.perf_counter())
        self.spans.append(span)
        try:
            yield span
        finally:
            span.ended = time.perf_counter()

    def under_way(self) -> list[tuple[float, str]]:
        """(began, stage) of the spans that go on, in seconds since 1970."""
        return [(span.began + self._epoch, span.stage) for span in list(self.spans) if span.ended == math.inf]

    def ended(self) -> list[dict[str, Any]]:
        """The spans that have ended and that nobody has taken, as ``take`` gives them."""
        return [self._told(span) for span in list(self.spans) if span.ended < math.inf]

    def idle(self, stages: tuple[str, ...], since: float, until: float) -> float:
        """Seconds from ``since`` to ``until`` in which none of ``stages`` went on."""
        busy, reached = 0.0, since
        mine = [span for span in list(self.spans) if span.stage in stages]
        for span in sorted(mine, key=lambda span: span.began):
            began, ended = max(span.began, reached), min(span.ended, until)
            busy += max(ended - began, 0.0)
            reached = max(reached, ended)
        return until - since - busy

    def newest(self, count: int = 20) -> list[str]:
        """The newest spans in words, the oldest of them first."""
        return [
            f"{time.strftime('%H:%M:%S', time.localtime(span.began + self._epoch))} {span.stage}: "
            + (f"{span.ended - span.began:.1f} s" if span.ended < math.inf else "goes on")
            for span in list(self.spans)[-count:]
        ]

    def take(self, until: float) -> list[dict[str, Any]]:
        """The spans that ended by ``until``, each given once, with times in seconds since 1970."""
        ended = [span for span in list(self.spans) if span.ended <= until]
        for span in ended:
            self.spans.remove(span)
        return [self._told(span) for span in ended]

    def _told(self, span: Span) -> dict[str, Any]:
        return {"stage": span.stage, "began": span.began + self._epoch, "ended": span.ended + self._epoch}
