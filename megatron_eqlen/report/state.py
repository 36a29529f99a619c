"""``state.json``: the run's present activity, for readers of its folder.

A thread of rank 0 writes it when a stage begins or ends, and every ``BEAT`` seconds as a sign of life. It is
no record: no resumed run reads it, and it is not flushed to the disk.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import deque
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from megatron_eqlen.files import expecting, read_json
from megatron_eqlen.processes.hold import HeldError, Hold
from megatron_eqlen.processes.timeline import Timeline
from megatron_eqlen.report.progress import Progress

FILE = "state.json"
LOOK, BEAT = 0.5, 15.0
"""Seconds between two looks at the stages, and at most between two writes."""

Moment = tuple[float, str]
"""Seconds since 1970, and a stage that began or a warning that was given then."""


@dataclass(frozen=True)
class State:
    time: float
    """Time of the write in seconds since 1970."""
    stages: list[Moment] = field(default_factory=list)
    """Stages in progress: none while model and engine start, several while a harvest runs beside training."""
    spans: list[dict[str, Any]] = field(default_factory=list)
    """Stages that have ended in the steps in progress, as in metrics.jsonl."""
    warnings: list[Moment] = field(default_factory=list)
    """Newest warnings since the process started, oldest first."""
    ended: bool = False
    """True if the process ended in order, whether the run is complete or not."""
    error: str | None = None
    """The error that ended the process, if one did."""


def read_state(folder: Path) -> State | None:
    """Read the state; None if the run has not written it yet."""
    path = folder / FILE
    if not path.exists():
        return None
    found = read_json(path)
    with expecting("the state of a run", path):
        moments = {name: [(since, text) for since, text in found[name]] for name in ("stages", "warnings")}
        return State(**found | moments)


class StateWriter:
    """Writes the state while the run lasts; use as a context manager. A process that no longer holds the
    folder writes nothing."""

    def __init__(self, folder: Path, hold: Hold, timeline: Timeline, progress: Progress) -> None:
        self._path, self._hold = folder / FILE, hold
        self._timeline, self._progress = timeline, progress
        self._written: State | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True, name="state")
        self._handler = _Handler(progress.warnings)

    def __enter__(self) -> StateWriter:
        logging.getLogger("megatron_eqlen").addHandler(self._handler)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *_: object) -> None:
        logging.getLogger("megatron_eqlen").removeHandler(self._handler)
        self._over.set()
        self._thread.join()
        self._write(ended=True, error=None if kind is None else f"{kind.__name__}: {error}")

    def _follow(self) -> None:
        self._write()
        while not self._over.wait(LOOK):
            self._write()

    def _write(self, **end: Any) -> None:
        """Write the state if something has changed or the last sign of life is old."""
        timeline = self._timeline
        state = State(time.time(), timeline.under_way(), timeline.ended(), [*self._progress.warnings], **end)
        before = self._written
        if before and _news(before) == _news(state) and state.time - before.time < BEAT:
            return
        partial = self._path.with_name(f".{FILE}.partial")
        try:
            self._hold.check()
            partial.write_text(json.dumps(asdict(state)), encoding="utf-8")
            partial.replace(self._path)
        except (HeldError, OSError):
            # another process writes the state now; or the disk is full, which the metrics' writer reports
            return
        self._written = state


def _news(state: State) -> State:
    """Return the part of the state whose changes are worth a write."""
    return replace(state, time=0.0)


class _Handler(logging.Handler):
    """Keeps the warnings of the package's own loggers."""

    def __init__(self, warnings: deque[Moment]) -> None:
        super().__init__(logging.WARNING)
        self._warnings = warnings

    def emit(self, record: logging.LogRecord) -> None:
        self._warnings.append((record.created, record.getMessage()))
        if logging.lastResort is not None and not logging.getLogger().handlers:
            logging.lastResort.handle(record)  # the handler that prints warnings of loggers without one
