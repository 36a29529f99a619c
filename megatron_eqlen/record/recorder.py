"""Writer of a step's rollouts: a thread records them while they are harvested (``reader`` reads them).

    step-00000012/rank-0.arrow          rollouts that a rank recorded (``format``)
    step-00000012/rank-0-2.arrow        of the rank's next attempt at the step, or next batch of prompts
    step-00000012/open-rank-0.arrow     tokens of unfinished rollouts, in the same format; once the harvest
                                        has ended, of those that the next step resumes, or removed
    step-00000012/grades-rank-0.arrow   grades, once they are known; nothing is written twice

A process killed at any moment loses the tokens of at most ``INTERVAL`` seconds. The result of a harvester
depends on the tokens of its tracks alone, so an unfinished rollout is recorded as these: a new attempt, or
the next step, gives its tracks the tokens that they had, its harvester cuts the same parts, and the engine
continues where the tokens end. What the harvest has counted is recorded after them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa

from megatron_eqlen.files import replaced, unused
from megatron_eqlen.record.arrow_log import ArrowLog
from megatron_eqlen.record.format import (
    GRADES,
    SEGMENTS,
    RecordedRow,
    grade_rows,
    portions,
    prompt_row,
    rollout_rows,
    to_batch,
    track_rows,
)
from megatron_eqlen.sampling.harvester import HarvestObserver
from megatron_eqlen.sampling.track import Track
from megatron_eqlen.types import Rollout, RolloutKey

FILES = "rank-*.arrow"
"""Names of files in a step's folder."""
OPEN = "open-"
"""Prefix of the name of a file of unfinished rollouts; the name of the file of rollouts is appended."""
OPEN_FILES = f"{OPEN}{FILES}"
GRADE_FILES = "grades-*.arrow"

INTERVAL = 2.0
"""Seconds between two looks at the tracks of a harvest."""

NewTokens = tuple[Track, int, int, bool]
"""Arguments of ``track_rows``: a track, the numbers of its first new token and of the one after the last, and
whether its prompt's columns are new as well."""


class Recorder(HarvestObserver):
    """Records rollouts in a new file: ``path``, or ``NAME-2`` ... where that exists. Makes the folder.

    ``write`` records a rollout at once. As the observer of a harvest it records the tokens of tracks as well,
    every ``INTERVAL`` seconds, all as they are after one decode step: the next attempt resumes from the state
    of one moment. ``without``: columns that the record of complete rollouts leaves out. A later call,
    ``close`` at the latest, raises an error of the thread (a full disk, say).
    """

    def __init__(self, path: str | Path, without: Collection[str] = ()) -> None:
        path = Path(path)
        self._without = without
        path.parent.mkdir(parents=True, exist_ok=True)
        # a name is also taken where an earlier attempt left only its file of open tracks
        self.path = unused(path, OPEN)
        self._file = ArrowLog(self.path, SEGMENTS)
        self._open_path = self.path.with_name(OPEN + self.path.name)
        self._open_file: ArrowLog | None = None
        """Made with the first new tokens."""
        self._tracks: dict[Track, int] = {}
        """Tracks of unfinished rollouts, and how many of their tokens were written before."""
        self._contexts: set[RolloutKey] = set()
        """Rollouts whose prompt's columns were written before."""
        self._prompts: set[str] = set()
        """Ids of the prompts that the file holds."""
        self._complete: list[RecordedRow] = []
        """Rows of rollouts that wait for the next write."""
        self._suspended: list[tuple[list[RecordedRow], Sequence[Track]]] = []
        """Rows and tracks of suspended rollouts."""
        self._due = time.monotonic() + INTERVAL
        self._note: Callable[[], str] = str
        """Returns what the harvest has counted (``NOTE_KEY``)."""
        # a single thread: batches reach the disk in the order in which they were put
        self._thread = ThreadPoolExecutor(1, "recorder")
        self._writing: Future[None] | None = None

    def write(self, rollout: Rollout) -> None:
        """Record one rollout, without grades, after its prompt. Its tables must not be changed any more."""
        self._put([], self._rows(rollout, None))

    def harvest_started(self, first: str, counts: Mapping[str, int]) -> None:
        """Record ``counts`` with each write."""
        self._note = lambda: json.dumps((first, counts))

    def track_launched(self, track: Track) -> None:
        """Record the tokens that the track gets from now on."""
        self._tracks.setdefault(track, len(track.tokens))

    def rollout_completed(self, rollout: Rollout, generated_tokens: int) -> None:
        """Record a rollout with the next write."""
        self._complete += self._rows(rollout, generated_tokens)

    def rollout_suspended(self, rollout: Rollout, generated_tokens: int, tracks: Sequence[Track]) -> None:
        """Record a rollout and all tokens of its tracks at the end of the harvest."""
        self._suspended.append((self._rows(rollout, generated_tokens), tracks))

    def decode_step_finished(self, last: bool = False) -> None:
        """Record new tokens and rollouts if ``INTERVAL`` is over, or at the end of the harvest."""
        now = time.monotonic()
        if now >= self._due or last:
            self._due = now + INTERVAL
            tokens, rows = self._new_tokens(), self._complete
            self._complete = []
            if tokens or rows:
                self._put(tokens, rows)

    def close(self) -> None:
        """Wait until everything is on disk. Of unfinished rollouts only the suspended ones stay."""
        try:
            self._thread.shutdown()
            if self._writing is not None:
                self._writing.result()
            if self._suspended:  # first their tracks: rollouts on disk are never ahead of these
                self._write_suspended()
            _append(self._file, [], self._note())
            self._file.close()
        finally:
            self._abandon()
        if not self._suspended:
            self._open_path.unlink(missing_ok=True)

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if error is None:
            self.close()
        else:
            self._thread.shutdown()
            self._abandon()

    def _new_tokens(self) -> list[NewTokens]:
        """Return the tokens that tracks got since the last call. Costs no more than a look at each."""
        added: list[NewTokens] = []
        # a copy, since tracks that have ended are dropped on the way
        for track, start in list(self._tracks.items()):
            if len(track.tokens) > start:
                # a prompt's columns come with the first tokens, so they are looked for with each
                with_prompt = track.prompt_columns is not None and track.key not in self._contexts
                if with_prompt:
                    self._contexts.add(track.key)
                self._tracks[track] = len(track.tokens)
                added.append((track, start, self._tracks[track], with_prompt))
                if track.finish_reason is not None:
                    del self._tracks[track]
        return added

    def _write_suspended(self) -> None:
        """Replace the open tracks on disk by all tokens of the suspended rollouts, then record these."""
        # from the first token on: the new file replaces one that also holds rollouts completed meanwhile
        self._tracks, self._contexts = {track: 0 for _, tracks in self._suspended for track in tracks}, set()
        with replaced(self._open_path) as partial:
            file = ArrowLog(partial, SEGMENTS)
            _append(file, (row for new in self._new_tokens() for row in track_rows(*new)))
            file.close()
        _append(self._file, (row for rows, _ in self._suspended for row in rows))

    def _abandon(self) -> None:
        """Leave the files as they are, for the next attempt."""
        self._file.abandon()
        if self._open_file is not None:
            self._open_file.abandon()

    def _rows(self, rollout: Rollout, generated_tokens: int | None) -> list[RecordedRow]:
        rows = rollout_rows(rollout, generated_tokens, self._without)
        if rollout.prompt_id not in self._prompts:
            self._prompts.add(rollout.prompt_id)
            rows = [prompt_row(rollout.prompt), *rows]
        return rows

    def _put(self, tokens: list[NewTokens], rows: list[RecordedRow]) -> None:
        # an error of an earlier write ends the harvest here, in its own thread
        if self._writing is not None and self._writing.done():
            self._writing.result()
        self._writing = self._thread.submit(self._write, self._writing, tokens, rows, self._note())

    def _write(
        self, before: Future[None] | None, tokens: list[NewTokens], rows: list[RecordedRow], note: str
    ) -> None:
        """Write tokens in one batch with the note, so that all or none of them are read, then rollouts, which
        are never ahead of the open tracks on disk. Write nothing after a failure."""
        if before is not None:
            before.result()
        if tokens:
            if self._open_file is None:
                self._open_file = ArrowLog(self._open_path, SEGMENTS)
            self._open_file.write(to_batch([row for new in tokens for row in track_rows(*new)], note))
        _append(self._file, rows, note)


def _append(file: ArrowLog, rows: Iterable[RecordedRow], note: str = "") -> None:
    """Append rows of rollouts in portions, then a note."""
    for portion in portions(rows):
        file.write(to_batch(portion))
    if note:
        file.write(to_batch([], note))


def record_grades(path: Path, graded: Iterable[Rollout]) -> None:
    """Write the grades of rollouts that were recorded in ``path`` to a file beside it."""
    rows = grade_rows(graded)
    # later attempts, and further batches of prompts, add files
    with replaced(unused(path.with_name(f"grades-{path.name}"))) as partial:
        file = ArrowLog(partial, GRADES)
        file.write(pa.RecordBatch.from_pylist(rows, GRADES))
        file.close()
