"""A step's rollouts on disk, written by a thread of its own while they are harvested.

    step-00000012/rank-0.arrow            what a rank recorded: complete rollouts (``record_format``)
    step-00000012/rank-0-2.arrow          of the rank's next attempt at the step, or next batch of prompts
    step-00000012/journal-rank-0.arrow    tokens of unfinished ones (``journal``), while the harvest goes on
    step-00000012/suspended-rank-0.arrow  tokens of those that the next step goes on with
    step-00000012/grades-rank-0.arrow     grades, once they are known; nothing is written twice

A process killed at any moment loses what was not yet written: at most ``INTERVAL`` seconds of tokens.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from types import MappingProxyType

import pyarrow as pa

from megatron_eqlen.files import replaced, unused
from megatron_eqlen.rollout import journal
from megatron_eqlen.rollout.arrow_log import (
    OLD_VERSION,
    ArrowLog,
    batches,
    check_version,
    other_version,
    placed,
    values,
)
from megatron_eqlen.rollout.journal import Journal, News
from megatron_eqlen.rollout.record_format import (
    END,
    GRADES,
    PROMPT,
    SEGMENTS,
    SKELETON,
    Assembly,
    Row,
    from_batch,
    grade_rows,
    grades_of,
    portions,
    prompt_row,
    rollout_rows,
    to_batch,
)
from megatron_eqlen.sampling.track import Track, rollout_of
from megatron_eqlen.types import (
    Grade,
    Prompt,
    Rollout,
    RolloutKey,
    Routes,
    Segment,
    rollout_key,
    training_order,
)

FILES = "rank-*.arrow"
"""In a step's folder."""
JOURNALS = f"{journal.PREFIX}{FILES}"
SUSPENDED = f"{journal.SUSPENDED_PREFIX}{FILES}"
GRADE_FILES = "grades-*.arrow"
OLD_FILES = "rank-*.jsonl"
"""Of versions before 3."""

INTERVAL = 2.0
"""Seconds between two looks at the tracks of a harvest."""

RowKey = tuple[str, int | None]
"""(prompt_id, index of the rollout), or None for the prompt itself."""

logger = logging.getLogger(__name__)


class Recorder:
    """Records rollouts in a new file: ``path``, or ``NAME-2`` ... where that exists. Makes the folder.

    ``write`` records a rollout at once. A harvest calls ``follow``, ``complete`` and ``tick`` instead: they
    record its tracks' tokens as well, every ``INTERVAL`` seconds, and each time all that there is after one
    decode step, so that the next attempt goes on from a moment that there was.

    ``with_routes``: with the routes of rollouts, which are most of a record's bytes; the journal always has
    them.

    What the thread could not write (a full disk, say) is raised by a later call, ``close`` at the latest.
    """

    def __init__(self, path: str | Path, with_routes: bool = True) -> None:
        path = Path(path)
        self._with_routes = with_routes
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = unused(path)
        self._file = ArrowLog(self.path, SEGMENTS)
        self._journal = Journal(self.path.with_name(journal.PREFIX + self.path.name))
        self._prompts: set[str] = set()
        """Ids of those that the file holds."""
        self._complete: list[Row] = []
        """Rows of rollouts that wait for the next tick."""
        self._suspended: list[Sequence[Track]] = []
        """Tracks of each of those among them that are suspended."""
        self._due = time.monotonic() + INTERVAL
        self._queue: SimpleQueue[tuple[list[News], list[Sequence[Track]], list[Row]]] = SimpleQueue()
        self._thread = ThreadPoolExecutor(1, "recorder")
        self._writing: Future[None] | None = None

    def write(self, rollout: Rollout) -> None:
        """Record one rollout, without grades, after its prompt. Its arrays must not be changed any more."""
        self._put([], [], self._rows(rollout, None))

    def follow(self, track: Track) -> None:
        """Record the tokens that the track gets from now on."""
        self._journal.follow(track)

    def complete(self, rollout: Rollout, generated_tokens: int) -> None:
        """Record a rollout with the next tick. ``generated_tokens``: of all its tracks, in this step."""
        self._complete += self._rows(rollout, generated_tokens)

    def suspend(self, rollout: Rollout, generated_tokens: int, tracks: Sequence[Track]) -> None:
        """``complete`` for a rollout that the next step goes on with, from all tokens of ``tracks``. To be
        called at the end of a harvest: before one tick."""
        self._suspended.append(tracks)
        self.complete(rollout, generated_tokens)

    def tick(self, ended: bool = False) -> None:
        """Between two decode steps: record what is new if ``INTERVAL`` is over, or the harvest has
        ``ended``."""
        now = time.monotonic()
        if now >= self._due or ended:
            self._due = now + INTERVAL
            news, suspended, rows = self._journal.news(), self._suspended, self._complete
            self._suspended, self._complete = [], []
            if news or rows:
                self._put(news, suspended, rows)

    def close(self) -> None:
        """Wait until everything is on the disk. All rollouts are complete or suspended: the journal goes."""
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

    def _put(self, news: list[News], suspended: list[Sequence[Track]], rows: list[Row]) -> None:
        if self._writing is not None and self._writing.done():
            self._writing.result()
        self._queue.put((news, suspended, rows))
        self._writing = self._thread.submit(self._drain)

    def _drain(self) -> None:
        """Write what is waiting, rollouts after the tokens that they and the others had then: what is
        complete on disk is never ahead of the journal, nor of the file of suspended tracks."""
        rows: list[Row] = []
        try:
            while True:
                news, suspended, complete = self._queue.get_nowait()
                self._journal.write(news)
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


def read_dump(path: str | Path) -> list[Rollout]:
    """The rollouts of a file with the grades beside it, in the order in which they were completed.

    A torn end is dropped with a warning. Raises ValueError, naming the file, where it is damaged, is no
    record of rollouts, or is of another version of the format.
    """
    path = Path(path)
    return list(_assembled([path]).rollouts.values())


def read_step(
    folder: Path, prompt_ids: Collection[str] | None = None, with_routes: bool = True
) -> list[Rollout]:
    """The rollouts of a step's folder, whichever ranks recorded them, in training order; each once.

    ``prompt_ids``: only theirs. Files that hold none of them are not read. Without ``with_routes`` they have
    none, whatever is recorded.
    """
    files = _naming(step_files(folder), prompt_ids)
    return _in_training_order(_assembled(files, prompt_ids=prompt_ids, with_routes=with_routes))


def read_skeletons(files: Sequence[Path]) -> list[Rollout]:
    """The rollouts of some of a step's files without arrays: lengths, grades and finish reasons, as
    ``read_step``. It costs what their number costs, not their tokens: checksums are not looked at. Prompts
    have neither tokens nor golds."""
    return _in_training_order(_assembled(files, SKELETON))


def read_prompts(files: Sequence[Path]) -> list[Prompt]:
    """The whole prompts of some of a step's files, in the order in which they were drawn."""
    assembly, columns = Assembly(), (*SKELETON, "token_ids", "gold")
    for path in files:
        named: set[RowKey] = {(name, None) for name in values(path, SEGMENTS, "prompt_id")}
        for batch in batches(path, SEGMENTS, columns, _places(path, named)):
            for row in from_batch(batch):
                if row["role"] == PROMPT:
                    assembly.take(row)
    return sorted(assembly.prompts.values(), key=lambda prompt: prompt.number)


def fill_token_ids(skeletons: Sequence[Rollout], files: Sequence[Path]) -> None:
    """Read the token ids of some of the rollouts that ``read_skeletons`` found in ``files``."""
    rows: set[RowKey] = {row for one in skeletons for row in (rollout_key(one), (one.prompt_id, None))}
    whole = _assembled(files, (*SKELETON, "token_ids"), rows).rollouts
    for skeleton in skeletons:
        segments = zip(skeleton.segments(), whole[rollout_key(skeleton)].segments(), strict=True)
        for segment, found in segments:
            segment.token_ids = found.token_ids


@dataclass
class Left:
    """What earlier attempts at a step have recorded of some prompts."""

    rollouts: list[Rollout] = field(default_factory=list)
    """Complete, in training order."""
    tracks: dict[str, Segment] = field(default_factory=dict)
    """Tokens of unfinished ones, by ``Track.name``."""
    generated_tokens: int = 0
    """Of all these: they count towards ``rollout.tokens_per_step``."""
    prompt_routes: dict[RolloutKey, Routes] = field(default_factory=dict)
    """Of unfinished ones."""


def read_left(files: Sequence[Path], prompt_ids: Collection[str], with_routes: bool = False) -> Left:
    """What ``left_files`` hold of ``prompt_ids``. ``with_routes``: tokens without routes (the attempt kept
    none, or ``rollout.record_routes`` is off) are left out, and generated again."""
    recorded = [path for path in files if not _is_journal(path)]
    assembly = _assembled(_naming(recorded, prompt_ids), prompt_ids=prompt_ids, with_routes=with_routes)
    journaled = journal.read_journals(filter(_is_journal, files), prompt_ids)
    tracks = journaled.tracks
    if with_routes:
        for key in [key for key, rollout in assembly.rollouts.items() if not has_routes(rollout)]:
            del assembly.rollouts[key]
        tracks = {
            name: known
            for name, known in tracks.items()
            if known.routes is not None and rollout_of(name) in journaled.prompt_routes
        }
    tracks = {name: known for name, known in tracks.items() if rollout_of(name) not in assembly.rollouts}
    generated = sum(assembly.generated_tokens[key] for key in assembly.rollouts)
    generated += sum(map(len, tracks.values()))
    return Left(_in_training_order(assembly), tracks, generated, journaled.prompt_routes)


def has_routes(rollout: Rollout) -> bool:
    """Whether all its tokens have routes, and its prompt if there are any."""
    routes = [one.routes for one in rollout.segments() if len(one)]
    return not routes or all(one is not None for one in (rollout.prompt_routes, *routes))


def left_files(folder: Path) -> list[Path]:
    """A step's files of rollouts and its journals."""
    return step_files(folder) + _in_order(folder.glob(JOURNALS))


def remove_journals(files: Iterable[Path], prompt_ids: Collection[str]) -> None:
    """Remove the journals among ``files`` that hold no others' than ``prompt_ids``', whose rollouts are
    complete."""
    for path in filter(_is_journal, files):
        if journal.prompts_of(path).issubset(prompt_ids):
            path.unlink(missing_ok=True)


def set_aside_stale(
    folder: Path, oldest: int, newest: float, carried: Mapping[RolloutKey, int] = MappingProxyType({})
) -> None:
    """Rename a step's record, and those of the steps after it, if weights of other versions than ``oldest``
    to ``newest`` generated any of it. What it ``carried`` from earlier steps may have tokens that are as old
    as is said there.

    So it is where a run has gone back to a checkpoint, and an update that was skipped before was taken now.
    """
    files = left_files(folder)
    found = {version for path in files for version in _versions(path, oldest, carried)}
    if any(not oldest <= version <= newest for version in found):
        later = [one for one in sorted(folder.parent.glob("step-*")) if one.name > folder.name]
        aside, *_ = [one.rename(unused(one.with_name(f"stale-{one.name}"))) for one in (folder, *later)]
        logger.warning(
            "%s: generated with policy version %s, but this run is at %d: set aside as %s",
            folder,
            ", ".join(map(str, sorted(found))),
            oldest,
            aside.name,
        )


def _versions(path: Path, oldest: int, carried: Mapping[RolloutKey, int]) -> set[int]:
    """Of the rollouts that a file holds and of their tokens, less those before ``oldest`` that are
    ``carried``."""
    if _is_journal(path):  # of this step alone
        return values(path, journal.SCHEMA, "policy_version")
    found = values(path, SEGMENTS, "policy_version") - {None}  # prompts have none
    for batch in batches(path, SEGMENTS, ["prompt_id", "index", "versions"]):
        for prompt_id, index, runs in zip(*(column.to_pylist() for column in batch.columns), strict=True):
            allowed = range(carried.get((prompt_id, index), oldest), oldest)
            found |= {version for version in (runs or ())[1::2] if version not in allowed}
    return found


def step_files(folder: Path) -> list[Path]:
    """A step's recorded files. Raises ValueError where they are of an older version."""
    if old := sorted(folder.glob(OLD_FILES)):
        raise other_version(old[0], OLD_VERSION)
    return _in_order(folder.glob(FILES))


def _is_journal(path: Path) -> bool:
    return path.name.startswith(journal.PREFIX)


def _in_order(files: Iterable[Path]) -> list[Path]:
    """``rank-0``, ``rank-1``, ``rank-0-2``: first attempts first."""
    return sorted(files, key=lambda path: (len(path.name), path.name))


def read_grades(folder: Path) -> dict[tuple[str, int, int], Grade]:
    """All grades of a step's folder, by prompt_id, index and number of the segment."""
    grades: dict[tuple[str, int, int], Grade] = {}
    for path in _in_order(folder.glob(GRADE_FILES)):
        table = pa.ipc.open_file(pa.memory_map(str(path))).read_all()
        check_version(path, table.schema)
        grades = grades_of(table.to_pylist()) | grades
    return grades


def read_streams(path: str | Path) -> Iterator[pa.Table]:
    """Recorded segments for a notebook: a table for each file of ``path``, which is a file, a step's folder
    or a run's ``streams/`` folder.

    Columns are those of ``record_format.SEGMENTS`` up to ``mask_counts``, then ``step`` (the folder's name)
    and ``reward`` and ``verdict``, null where a segment ends no graded response.
    """
    path = Path(path)
    files = (
        [path]
        if path.is_file()
        else [*step_files(path)]
        or [file for folder in sorted(path.glob("step-*")) for file in step_files(folder)]
    )
    for file in files:
        yield _table(file)


def _table(path: Path) -> pa.Table:
    table = pa.Table.from_batches(list(batches(path, SEGMENTS)), SEGMENTS)
    roles = table["role"].to_pylist()
    table = table.filter(pa.array([role not in (PROMPT, END) for role in roles]))
    table = table.select(SEGMENTS.names[: SEGMENTS.names.index("question")])
    grades, keys = read_grades(path.parent), ("prompt_id", "index", "number")
    found = [grades.get(key) for key in zip(*(table[name].to_pylist() for name in keys), strict=True)]
    for name, column in {
        "step": [path.parent.name] * len(found),
        "reward": [grade and grade.reward for grade in found],
        "verdict": [grade and grade.verdict for grade in found],
    }.items():
        table = table.append_column(name, pa.array(column, pa.float64() if name == "reward" else pa.string()))
    return table


def _in_training_order(assembly: Assembly) -> list[Rollout]:
    return sorted(assembly.rollouts.values(), key=training_order)


def _naming(files: Sequence[Path], prompt_ids: Collection[str] | None) -> list[Path]:
    """The files that hold any of ``prompt_ids``."""
    if prompt_ids is None:
        return list(files)
    return [path for path in files if not values(path, SEGMENTS, "prompt_id").isdisjoint(prompt_ids)]


def _assembled(
    files: Sequence[Path],
    columns: Sequence[str] | None = None,
    wanted: set[RowKey] | None = None,
    prompt_ids: Collection[str] | None = None,
    with_routes: bool = True,
) -> Assembly:
    """What the files of one folder hold: all of it, only the ``wanted`` rows, or those of some prompts."""
    assembly = Assembly(read_grades(files[0].parent) if files else {}, with_routes=with_routes)
    for path in files:
        for batch in batches(path, SEGMENTS, columns, None if wanted is None else _places(path, wanted)):
            for row in from_batch(batch):
                asked = prompt_ids is None or row["prompt_id"] in prompt_ids
                if asked and (wanted is None or (row["prompt_id"], row["index"]) in wanted):
                    assembly.take(row)
    return assembly


def _places(path: Path, wanted: set[RowKey]) -> list[int]:
    """Where the batches begin that hold any of the rows."""
    return [
        place
        for place, batch in placed(path, SEGMENTS, ["prompt_id", "index"])
        if not wanted.isdisjoint(zip(*(column.to_pylist() for column in batch.columns), strict=True))
    ]
