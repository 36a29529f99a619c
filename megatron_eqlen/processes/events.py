"""Record of what happened to a run: ``events.jsonl`` in its folder, one JSON object a line, appended only.

    ranks, watchdog, launchers, commands ── append ──┐
    stages, steps, warnings ── EventWriter (thread) ─┼─► RUN/events.jsonl ─► read ─► report/run_state.py
    slurm/*.sbatch ── note (common.sh) ──────────────┘

Each event has ``time`` (seconds since 1970), ``kind``, ``host``, ``rank`` if a rank wrote it, and few more:

    submitted     job, recipe              by eqlen submit and eqlen sweep --slurm
    try           job, restart             a batch script begins
    started       pid, job, restart        a process has locked the folder
    resumed       step                     a checkpoint is loaded; step: steps taken
    stage         stage, [began]           a stage begins; with ``began`` it ends
    step          step                     a step is complete
    saved         step                     a checkpoint is in force
    warning       text
    stopped       step, text               the file STOP, or a limit on the mismatch, ends the run
    error         text                     what ended a rank or a node; a traceback may follow the first line
    hang          file, text               no rank has made progress; the file with the stacks
    unready       host                     a node failed its check
    node_failed   host                     a node's ranks have failed
    requeued      stalled, text            stalled: number of tries in a row without a new step
    given_up      stalled, text            no further try is made
    cancelled     text                     SLURM told the try to end
    ended         error                    the process ended in order; error: None, or what ended it

Any process may append. A line is one write under a lock, so that lines of several machines do not mix. A line
that was torn, by a full disk or a power cut, stays alone in its line, and ``read`` skips it.
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
from pathlib import Path
from typing import Any

from megatron_eqlen.processes.hold import HeldError

FILE = "events.jsonl"
LOST = "events.lost"
"""Empty file: an error could not be appended, because the disk is full."""
BEAT = 15.0
"""Seconds at most between two signs of life of a run: an event, or else a new time stamp of the file."""
LOCK_PATIENCE = 2.0
"""Seconds to wait for the lock; a process that was stopped may hold it."""
KEPT = 1000
"""Number of events that wait for a slow disk; older ones are dropped."""

Event = dict[str, Any]

logger = logging.getLogger(__name__)


def append(run: Path, kind: str, **fields: Any) -> None:
    """Append one event. Raises OSError if the file cannot be written."""
    _write(run, [_event(kind, fields)])


def read(run: Path, offset: int = 0) -> tuple[list[Event], int]:
    """Return the events from byte ``offset`` on, and the offset of the next.

    A last line without its end may still be in writing: the next call reads it. Lines that are not JSON were
    torn, and are skipped with a warning. Raises ValueError with the file's name for any other line.
    """
    path = run / FILE
    try:
        with open(path, "rb") as file:
            file.seek(offset)
            data = file.read()
    except FileNotFoundError:
        return [], 0
    complete = data[: data.rfind(b"\n") + 1]
    return [*_parse(complete, path)], offset + len(complete)


def _parse(data: bytes, path: Path) -> Iterator[Event]:
    for line in filter(None, data.split(b"\n")):
        try:
            event = json.loads(line)
        except ValueError:
            logger.warning("%s: skipped a torn line of %d bytes", path, len(line))
            continue
        if not isinstance(event, dict) or not {"time", "kind"} <= event.keys():
            raise ValueError(f"{path}: expected an event with a time and a kind, found {line[:80]!r}")
        yield event


def _event(kind: str, fields: dict[str, Any]) -> Event:
    rank = {"rank": int(os.environ["RANK"])} if "RANK" in os.environ else {}
    made = {"time": round(time.time(), 3), "kind": kind, "host": socket.gethostname(), **rank}
    return made | fields


def _write(run: Path, events: Iterable[Event]) -> None:
    data = "".join(json.dumps(event, ensure_ascii=False) + "\n" for event in events).encode()
    file = os.open(run / FILE, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        _lock(file)
        size = os.fstat(file).st_size
        if size and os.pread(file, 1, size - 1) != b"\n":  # a torn line
            data = b"\n" + data
        while data:  # a full disk raises; a signal may shorten a write
            data = data[os.write(file, data) :]
        fcntl.flock(file, fcntl.LOCK_UN)  # closing is not enough: a process forked meanwhile has the file
    finally:
        os.close(file)


def _lock(file: int) -> None:
    """Lock the file, or give up: file systems without locks append whole lines on one machine."""
    deadline = time.monotonic() + LOCK_PATIENCE
    while time.monotonic() < deadline:
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(0.005)
        except OSError:
            return None
    return None


class EventWriter:
    """Writes the events of a run's process from a thread, so that a slow disk does not delay the run. Events
    noted before ``writing`` wait for it."""

    def __init__(self) -> None:
        self._waiting: deque[Event] = deque(maxlen=KEPT)
        self._news, self._over = threading.Event(), threading.Event()

    def note(self, kind: str, **fields: Any) -> None:
        """Append an event, soon."""
        self._waiting.append(_event(kind, fields))
        self._news.set()

    @contextmanager
    def writing(self, run: Path, check: Callable[[], None]) -> Iterator[None]:
        """Write to ``run`` while the block lasts, also the warnings of the package's loggers, and how the
        block ends. ``check`` raises HeldError if another process holds the folder: then nothing is written.
        """
        handler, error = _Warnings(self.note), None
        logging.getLogger("megatron_eqlen").addHandler(handler)
        thread = threading.Thread(target=self._follow, args=(run, check), daemon=True, name="events")
        thread.start()
        try:
            yield
        except BaseException as raised:
            error = f"{type(raised).__name__}: {raised}"
            raise
        finally:
            logging.getLogger("megatron_eqlen").removeHandler(handler)
            self.note("ended", error=error)
            self._over.set()
            thread.join()

    def _follow(self, run: Path, check: Callable[[], None]) -> None:
        over = False
        while not over:
            self._news.wait(BEAT)
            self._news.clear()
            over = self._over.is_set()
            events = [self._waiting.popleft() for _ in range(len(self._waiting))]
            now = time.time()
            with suppress(HeldError, OSError):  # the writer of metrics reports a full disk
                check()
                _write(run, events) if events else os.utime(run / FILE, (now, now))


class _Warnings(logging.Handler):
    """Notes the warnings of the package's own loggers."""

    def __init__(self, note: Callable[..., None]) -> None:
        super().__init__(logging.WARNING)
        self._note = note

    def emit(self, record: logging.LogRecord) -> None:
        self._note("warning", text=record.getMessage())
        if logging.lastResort is not None and not logging.getLogger().handlers:
            logging.lastResort.handle(record)  # the handler that prints warnings of loggers without one
