"""Metrics on disk: ``metrics.jsonl``, one line a step. Each is written in one system call: a killed process
leaves at most one torn last line. A run that resumes removes later lines, so no step appears twice."""

from __future__ import annotations

import json
import logging
import math
import os
import sys
import time
from array import array
from collections.abc import Collection, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from pydantic_core import from_json

from megatron_eqlen.files import naming, opened
from megatron_eqlen.report.trackers import Trackers
from megatron_eqlen.types import Metrics

FILE = "metrics.jsonl"
TAIL = 1 << 18
"""Bytes read from the end of the file at first; a record has some thousands."""

Records = list[dict[str, Any]]
"""One dict a step: ``step`` (int), ``time`` (Unix seconds), and the metrics (float, None if not finite)."""

logger = logging.getLogger(__name__)


class MetricsWriter:
    """Writes into a run folder, and hands the same metrics to a tracker; rank 0 has one. Use as a context:
    the tracker learns whether an error ends the run. Lines after ``step``, the steps taken, are removed."""

    def __init__(self, folder: Path, step: int = 0, tracker: Trackers | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.tracker = tracker
        self._path = folder / FILE
        _cut_after(self._path, step)
        self.file = open(self._path, "ab", buffering=0)  # noqa: SIM115 (closed by close)

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self.close(failed=error is not None)

    def close(self, failed: bool = False) -> None:
        self.file.close()
        if self.tracker is not None:
            self.tracker.finish(failed)

    def write(self, step: int, metrics: Metrics) -> None:
        """Append the metrics of ``step`` (counted from 1). Numbers that are not finite become null."""
        finite = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        record = {"step": step, "time": time.time(), **finite}
        line = memoryview(json.dumps(record).encode() + b"\n")
        with naming(self._path):
            while line:  # a full disk raises; a signal may shorten a write
                line = line[self.file.write(line) :]
        if self.tracker is not None:
            self.tracker.log(step, metrics)


def read_newest(folder: Path, count: int) -> Records:
    """Return the records of the newest ``count`` steps, from the end of the file alone."""
    path, size = folder / FILE, TAIL
    if not os.path.lexists(path):
        return []
    with opened(path) as file:
        whole = file.seek(0, 2)
        # a longer end each time, until it has a line more than asked for: its first one may be cut
        while True:
            file.seek(max(whole - size, 0))
            *lines, torn = file.read().split(b"\n")
            if size >= whole or len(lines) > count:
                if torn:
                    _warn_of_torn(path, len(torn))
                return [_record(line, str(path)) for line in lines[-count:]]
            size *= 4


class Columns:
    """A run's metrics as columns: ``steps``, ``times`` (Unix seconds) and, by name, the values asked for:
    float64, an element for each step, NaN where it has no number."""

    def __init__(self, folder: Path, names: Collection[str]) -> None:
        self.last: dict[str, Any] = {}
        """The whole record of the newest step; empty before the first."""
        numbers, kept = array("d"), ("step", "time", *names)
        for _, self.last in _lines(folder / FILE):
            values = map(self.last.get, kept)
            numbers.extend(math.nan if value is None else value for value in values)
        self._values = dict(zip(kept, np.array(numbers).reshape(-1, len(kept)).T, strict=True))
        self.steps, self.times = self._values["step"], self._values["time"]

    def __getitem__(self, name: str) -> np.ndarray:
        return self._values[name]

    def first_of(self, names: Sequence[str]) -> np.ndarray:
        """Return the values of the first of ``names`` that the run measured."""
        return next((self[name] for name in names if np.isfinite(self[name]).any()), self[names[0]])


def _lines(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Yield lines with their records; warn of a torn last line. Raises ValueError for any other bad line."""
    if not os.path.lexists(path):
        return
    with opened(path) as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                _warn_of_torn(path, len(line))
                return
            yield line, _record(line, f"{path}:{number}")


@cache
def _warn_of_torn(path: Path, size: int) -> None:
    """Warn once, however often the file is read."""
    logger.warning("%s: dropped a torn last line of %d bytes", path, size)


def _record(line: bytes, where: str) -> dict[str, Any]:
    try:
        record = from_json(line)  # three times as fast as json
    except ValueError:
        record = None
    if not isinstance(record, dict) or type(record.get("step")) is not int or "time" not in record:
        raise ValueError(f"{where}: expected a JSON object with a step and a time, found {line[:80]!r}")
    for name, value in record.items():
        number = type(value) in (int, float) and abs(value) <= sys.float_info.max
        if not number and (value is not None or name == "time"):
            raise ValueError(f"{where}: {name}: expected a finite number, found {value!r:.80}")
    return record


def _cut_after(path: Path, step: int) -> None:
    """Cut the file off after the record of ``step``, or before a torn last line."""
    if not os.path.lexists(path):
        return
    end = 0
    for line, record in _lines(path):
        # steps are in order: all lines from here on are of an attempt that is trained again
        if record["step"] > step:
            break
        end += len(line)
    os.truncate(path, end)
