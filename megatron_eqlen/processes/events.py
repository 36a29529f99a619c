"""Record of what happened to a run: ``events.jsonl`` in its folder, one JSON object a line, appended only.

    ranks, watchdog, launchers, commands ── append ──┐
    stages, steps, warnings ── EventWriter (thread) ─┼─► RUN/events.jsonl ─► read ─► processes/run_state.py
    slurm/*.sbatch ── note (common.sh) ──────────────┘

``docs/run_folder.md`` lists the kinds of events and their fields, and says how lines are kept apart.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from megatron_eqlen.files import expecting, naming, opened

FILE = "events.jsonl"
STAGE, STEP = b'"kind": "stage"', b'"kind": "step"'
LOST = "events.lost"
"""Empty file: an event could not be appended, because the disk is full."""
BEAT = 15.0
"""Seconds at most between two signs of life of a run: an event, or else a new time stamp of the file."""
LOCK_PATIENCE = 2.0
"""Seconds to wait for the lock; a process that was stopped may hold it."""
MOST_WAITING = 1000
"""Number of events that wait for a slow disk; older ones are dropped."""

Event = dict[str, Any]

logger = logging.getLogger(__name__)


def append(run: Path, kind: str, **fields: Any) -> None:
    """Append one event. Raises OSError if the file cannot be written."""
    try:
        _write(run, [_event(kind, fields)])
    except OSError:
        with suppress(OSError):
            (run / LOST).touch()  # a full disk still has room for a name
        raise


def read(run: Path, newest: int | None = None) -> list[Event]:
    """Return the events so far; with ``newest``, steps and stages only from so many bytes at the end.

    A last line without its end may still be in writing, and is left out. Lines that are not JSON were torn,
    and are skipped with a warning. Raises ValueError with the file's name for any other line.
    """
    path, events = run / FILE, []
    if not os.path.lexists(path):
        return []
    with opened(path) as file:
        # Bytes before ``old`` are skimmed: steps and stages, most of the lines, are not parsed there.
        old, place = 0 if newest is None else os.fstat(file.fileno()).st_size - newest, 0
        for line in file:
            place += len(line)
            if place <= old and (STAGE in line or STEP in line):
                continue
            # Empty lines come from ``note`` of the batch scripts, which begins with a line break.
            if not line.endswith(b"\n") or line == b"\n":
                continue
            try:
                event = json.loads(line)
            except ValueError:
                logger.warning("%s: skipped a torn line of %d bytes", path, len(line) - 1)
                continue
            with expecting("an event with a time and a kind", path):
                # Using the values checks their types: text adds to text, a time is a number.
                said = event.get("text") or event.get("error") or ""
                _ = event["kind"] + event.get("stage", "") + said, time.localtime(event["time"])
            events.append(event)
    return events


def began(run: Path) -> datetime:
    """Return the UTC time of the first event, the run's first start; now where there is none."""
    first = next(iter(read(run, 0)), None)
    return datetime.fromtimestamp(first["time"] if first else time.time(), UTC)


def _event(kind: str, fields: dict[str, Any]) -> Event:
    rank = {"rank": int(os.environ["RANK"])} if "RANK" in os.environ else {}
    return {"time": round(time.time(), 3), "kind": kind, "host": socket.gethostname(), **rank, **fields}


def _write(run: Path, events: Iterable[Event]) -> None:
    data = "".join(json.dumps(event) + "\n" for event in events).encode()
    file = os.open(run / FILE, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        # Without a lock in time it writes all the same: a torn line is skipped, an event would be lost.
        _lock(file)
        size = os.fstat(file).st_size
        if size and os.pread(file, 1, size - 1) != b"\n":  # a torn line
            data = b"\n" + data
        with naming(run / FILE):
            while data:  # a full disk raises; a signal may shorten a write
                data = data[os.write(file, data) :]
    finally:
        fcntl.flock(file, fcntl.LOCK_UN)  # closing is not enough: a process forked meanwhile has the file
        os.close(file)


def _lock(file: int) -> None:
    deadline = time.monotonic() + LOCK_PATIENCE
    while time.monotonic() < deadline:
        with suppress(BlockingIOError):
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        time.sleep(0.005)
    return None


class EventWriter(logging.Handler):
    """Writes a process's events in a thread, so that slow disks delay nothing; ``writing`` begins it."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._waiting: deque[Event] = deque(maxlen=MOST_WAITING)
        self._news, self._over = threading.Event(), threading.Event()

    def note(self, kind: str, **fields: Any) -> None:
        """Append an event, soon."""
        self._waiting.append(_event(kind, fields))
        self._news.set()

    def emit(self, record: logging.LogRecord) -> None:
        """Note a warning, and print it where no other handler does."""
        self.note("warning", text=record.getMessage())
        if logging.lastResort is not None and not logging.getLogger().handlers:
            logging.lastResort.handle(record)

    @contextmanager
    def writing(self, run: Path, check: Callable[[], None]) -> Iterator[None]:
        """Write to ``run`` in the block: events, the warnings of the package's loggers, and how it ends.
        ``check`` raises ValueError if another process holds the folder: then nothing is written."""
        error = None
        logging.getLogger("megatron_eqlen").addHandler(self)
        thread = threading.Thread(target=self._follow, args=(run, check), daemon=True, name="events")
        thread.start()
        try:
            yield
        except BaseException as raised:
            error = f"{type(raised).__name__}: {raised}"
            raise
        finally:
            logging.getLogger("megatron_eqlen").removeHandler(self)
            # In this order: the thread looks whether all is over before it takes the last events.
            self.note("ended", error=error)
            self._over.set()
            # It may have looked in between, and would wait for news.
            self._news.set()
            thread.join()

    def _follow(self, run: Path, check: Callable[[], None]) -> None:
        over = False
        while not over:
            self._news.wait(BEAT)
            self._news.clear()
            over = self._over.is_set()
            events = [self._waiting.popleft() for _ in range(len(self._waiting))]
            # No event for ``BEAT`` seconds: a new time stamp is the sign of life.
            now = time.time()
            # The writer of metrics reports a full disk, and the run's own checks a lock that is not read.
            with suppress(ValueError, OSError):
                check()
                _write(run, events) if events else os.utime(run / FILE, (now, now))
