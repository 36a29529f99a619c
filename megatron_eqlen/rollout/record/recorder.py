"""Writer of a step's rollouts: a thread records them while they are harvested (``record_reader`` reads them).

    step-00000012/rank-0.arrow            complete rollouts that a rank recorded (``record_format``)
    step-00000012/rank-0-2.arrow          of the rank's next attempt at the step, or next batch of prompts
    step-00000012/journal-rank-0.arrow    tokens of unfinished rollouts (``journal``), while the harvest runs
    step-00000012/suspended-rank-0.arrow  tokens of rollouts that the next step resumes
    step-00000012/grades-rank-0.arrow     grades, once they are known; nothing is written twice

A process killed at any moment loses only tokens that were not yet written: those of at most ``INTERVAL``
seconds.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from queue import Empty, SimpleQueue

import pyarrow as pa

from megatron_eqlen.files import replaced, unused
from megatron_eqlen.rollout.record import journal
from megatron_eqlen.rollout.record.arrow_log import ArrowLog
from megatron_eqlen.rollout.record.format import (
    GRADES,
    SEGMENTS,
    Row,
    grade_rows,
    portions,
    prompt_row,
    rollout_rows,
    to_batch,
)
from megatron_eqlen.rollout.record.journal import Journal, NewTokens
from megatron_eqlen.sampling.harvester import HarvestObserver
from megatron_eqlen.sampling.track import Track
from megatron_eqlen.types import Rollout

FILES = "rank-*.arrow"
"""Names of files in a step's folder."""
JOURNALS = f"{journal.PREFIX}{FILES}"
SUSPENDED = f"{journal.SUSPENDED_PREFIX}{FILES}"
GRADE_FILES = "grades-*.arrow"
OLD_FILES = "rank-*.jsonl"
"""Names of such files in versions before 3."""

INTERVAL = 2.0
"""Seconds between two looks at the tracks of a harvest."""


class Recorder(HarvestObserver):
    """Records rollouts in a new file: ``path``, or ``NAME-2`` ... where that exists. Makes the folder.

    ``write`` records a rollout at once. As the observer of a harvest it records the tokens of tracks as well,
    every ``INTERVAL`` seconds, and each time all tokens that there are after one decode step, so that the
    next attempt resumes from the state of one moment.

    ``with_routes``: with the routes of rollouts, which are most of a record's bytes; the journal always has
    them.

    An error of the thread (a full disk, say) is raised by a later call, ``close`` at the latest.
    """

    def __init__(self, path: str | Path, with_routes: bool = True) -> None:
        path = Path(path)
        self._with_routes = with_routes
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = unused(path)
        self._file = ArrowLog(self.path, SEGMENTS)
        self._journal = Journal(self.path.with_name(journal.PREFIX + self.path.name))
        self._prompts: set[str] = set()
        """Ids of the prompts that the file holds."""
        self._complete: list[Row] = []
        """Rows of rollouts that wait for the next write."""
        self._suspended: list[Sequence[Track]] = []
        """Tracks of the suspended rollouts among them."""
        self._due = time.monotonic() + INTERVAL
        self._queue: SimpleQueue[tuple[list[NewTokens], list[Sequence[Track]], list[Row]]] = SimpleQueue()
        self._thread = ThreadPoolExecutor(1, "recorder")
        self._writing: Future[None] | None = None

    def write(self, rollout: Rollout) -> None:
        """Record one rollout, without grades, after its prompt. Its arrays must not be changed any more."""
        self._put([], [], self._rows(rollout, None))

    def track_launched(self, track: Track) -> None:
        """Record the tokens that the track gets from now on."""
        self._journal.follow(track)

    def rollout_completed(self, rollout: Rollout, generated_tokens: int) -> None:
        """Record a rollout with the next write."""
        self._complete += self._rows(rollout, generated_tokens)

    def rollout_suspended(self, rollout: Rollout, generated_tokens: int, tracks: Sequence[Track]) -> None:
        """Record a rollout and all tokens of its tracks with the next write."""
        self._suspended.append(tracks)
        self.rollout_completed(rollout, generated_tokens)

    def decode_step_finished(self, last: bool = False) -> None:
        """Record new tokens and rollouts if ``INTERVAL`` is over, or at the end of the harvest."""
        now = time.monotonic()
        if now >= self._due or last:
            self._due = now + INTERVAL
            tokens, suspended, rows = self._journal.new_tokens(), self._suspended, self._complete
            self._suspended, self._complete = [], []
            if tokens or rows:
                self._put(tokens, suspended, rows)

    def close(self) -> None:
        """Wait until everything is on disk, then remove the journal: no rollout is unfinished."""
        try:
            self._stop()
        except BaseException:
            self._file.abandon()
            raise
        self._file.close()
        self._journal.remove()

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if error is None:
            self.close()
        else:
            self._thread.shutdown()
            self._file.abandon()
            self._journal.abandon()

    def _stop(self) -> None:
        self._thread.shutdown()
        if self._writing is not None:
            self._writing.result()

    def _rows(self, rollout: Rollout, generated_tokens: int | None) -> list[Row]:
        rows = rollout_rows(rollout, generated_tokens, self._with_routes)
        if rollout.prompt_id not in self._prompts:
            self._prompts.add(rollout.prompt_id)
            rows = [prompt_row(rollout.prompt), *rows]
        return rows

    def _put(self, tokens: list[NewTokens], suspended: list[Sequence[Track]], rows: list[Row]) -> None:
        if self._writing is not None and self._writing.done():
            self._writing.result()
        self._queue.put((tokens, suspended, rows))
        self._writing = self._thread.submit(self._drain)

    def _drain(self) -> None:
        """Write all that waits in the queue, rollouts after the tokens that all rollouts had then: rollouts
        on disk are never ahead of the journal, nor of the file of suspended tracks."""
        rows: list[Row] = []
        try:
            while True:
                tokens, suspended, complete = self._queue.get_nowait()
                self._journal.write(tokens)
                if suspended:
                    name = journal.SUSPENDED_PREFIX + self.path.name
                    journal.write_tracks(self.path.with_name(name), suspended)
                rows += complete
        except Empty:
            for portion in portions(rows):
                self._file.write(to_batch(portion))


def record(path: str | Path, rollouts: Sequence[Rollout]) -> None:
    """Record rollouts that are complete, with their grades."""
    with Recorder(path) as recorder:
        for rollout in rollouts:
            recorder.write(rollout)
    record_grades(Path(path), rollouts)


def record_grades(path: Path, graded: Iterable[Rollout]) -> None:
    """Write the grades of rollouts that were recorded in ``path`` to a file beside it."""
    rows = grade_rows(graded)
    with replaced(unused(path.with_name(f"grades-{path.name}"))) as partial:
        options = pa.ipc.IpcWriteOptions(compression="zstd")
        with pa.ipc.new_file(str(partial), GRADES, options=options) as file:
            file.write_table(pa.Table.from_pylist(rows, GRADES))
