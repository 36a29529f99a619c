"""Stages of a run as time spans, and the idle time of engine and trainer."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

ENGINE = ("harvest", "evaluate")
TRAINER = ("trees", "unpark", "train", "park", "sync", "checkpoint")
"""Stages in which engine and trainer work; graders work beside both."""


@dataclass
class TimeSpan:
    """A stage from ``began`` to ``ended``, in seconds of ``time.perf_counter``."""

    stage: str
    began: float
    ended: float = math.inf
    """Infinite while the stage runs."""


class Timeline:
    """Spans of this process, from several threads. ``note`` (``EventWriter.note``) gets begins and ends."""

    def __init__(self, note: Callable[..., None] = lambda kind, **fields: None) -> None:
        self.spans: deque[TimeSpan] = deque(maxlen=1000)  # more than a step's
        self._tell = note
        # Zero of ``perf_counter`` in seconds since 1970: spans are measured by it, events carry the time.
        self._epoch = time.time() - time.perf_counter()

    @contextmanager
    def span(self, stage: str) -> Iterator[TimeSpan]:
        span = TimeSpan(stage, time.perf_counter())
        self.spans.append(span)
        began = round(span.began + self._epoch, 3)
        self._tell("stage", stage=stage, time=began)
        try:
            yield span
        finally:
            span.ended = time.perf_counter()
            self._tell("stage", stage=stage, time=round(span.ended + self._epoch, 3), began=began)

    def idle(self, stages: tuple[str, ...], since: float, until: float) -> float:
        """Return the seconds from ``since`` to ``until`` in which none of ``stages`` ran."""
        # Spans may overlap: up to ``reached`` the time is counted already.
        busy, reached = 0.0, since
        relevant = [span for span in list(self.spans) if span.stage in stages]
        for span in sorted(relevant, key=lambda span: span.began):
            began, ended = max(span.began, reached), min(span.ended, until)
            busy += max(ended - began, 0.0)
            reached = max(reached, ended)
        return until - since - busy
