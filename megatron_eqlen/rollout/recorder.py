"""Rollouts on disk, written by a thread of its own as they complete.

    step-00000012/rank-0.arrow            what a rank recorded: an Arrow IPC stream, zstd (``record_format``)
    step-00000012/rank-0-2.arrow          of the rank's next attempt at the step, or next batch of prompts
    step-00000012/grades-rank-0.arrow     grades, once they are known; nothing is written twice

A record batch is written per rollout (or for those that completed meanwhile), so a process killed at any
moment loses what was being written, and leaves a torn batch at the file's end; reading drops it. A file
that was closed ends with a checksum, which is looked at before anything is read from it.
"""

from __future__ import annotations

import io
import logging
import os
import zlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import pyarrow as pa

from megatron_eqlen.files import replaced, unused
from megatron_eqlen.rollout.record_format import (
    END,
    GRADES,
    PROMPT,
    SEGMENTS,
    SKELETON,
    VERSION,
    VERSION_KEY,
    Assembly,
    Row,
    from_batch,
    grade_rows,
    grades_of,
    prompt_row,
    rollout_rows,
    to_batch,
)
from megatron_eqlen.types import Grade, Prompt, Rollout, rollout_key, training_order

FILES = "rank-*.arrow"
"""In a step's folder."""
GRADE_FILES = "grades-*.arrow"
OLD_FILES = "rank-*.jsonl"
"""Of versions before 3."""
OLD_VERSION = "2 or older (JSON lines)"
CONTINUES = b"\xff\xff\xff\xff"
"""What every message of an Arrow IPC stream begins with."""
CLOSED = b"eqlenend"
"""After the end of the stream of a file that was closed; then comes the CRC-32 of all before."""

RowKey = tuple[str, int | None]
"""(prompt_id, index of the rollout), or None for the prompt itself."""

logger = logging.getLogger(__name__)


class Recorder:
    """Records rollouts in a new file: ``path``, or ``NAME-2`` ... where that exists. Makes the folder.

    What the thread could not write (a full disk, say) is raised by the next ``write`` or by ``close``.
    """

    def __init__(self, path: str | Path) -> None:
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = unused(path)
        self._file = _Sink(self.path)
        self._stream = pa.ipc.new_stream(
            pa.PythonFile(self._file, mode="w"),
            SEGMENTS,
            options=pa.ipc.IpcWriteOptions(compression="zstd"),
        )
        self._prompts: set[str] = set()
        """Ids of those that the file holds."""
        self._queue: SimpleQueue[list[Row]] = SimpleQueue()
        self._thread = ThreadPoolExecutor(1, "recorder")
        self._writing: Future[None] | None = None
        self._write_batch([])  # the schema

    def write(self, rollout: Rollout) -> None:
        """Record one rollout, without grades, after its prompt. Its arrays must not be changed any more."""
        rows = rollout_rows(rollout)
        if rollout.prompt_id not in self._prompts:
            self._prompts.add(rollout.prompt_id)
            rows = [prompt_row(rollout.prompt), *rows]
        if self._writing is not None and self._writing.done():
            self._writing.result()
        self._queue.put(rows)
        self._writing = self._thread.submit(self._drain)

    def close(self) -> None:
        """Wait until everything is on the disk (a crash of the machine, not only of the process)."""
        try:
            self._thread.shutdown()
            if self._writing is not None:
                self._writing.result()
            self._check()
            self._stream.close()
            self._file.write(CLOSED + _crc_bytes(self._file.crc))
            os.fsync(self._file.fileno())
        finally:
            self._file.close()

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _drain(self) -> None:
        """Write what is waiting, as one batch."""
        rows: list[Row] = []
        try:
            while True:
                rows += self._queue.get_nowait()
        except Empty:
            if rows:
                self._write_batch(rows)

    def _write_batch(self, rows: list[Row]) -> None:
        self._check()
        self._stream.write_batch(to_batch(rows))

    def _check(self) -> None:
        if self._file.failed is not None:
            raise self._file.failed


class _Sink(io.RawIOBase):
    """A new file that counts its CRC-32."""

    def __init__(self, path: Path) -> None:
        self._file = open(path, "xb", buffering=0)  # noqa: SIM115 (closed by close)
        self.crc = 0
        self.failed: OSError | None = None
        """After which nothing may follow."""

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._file.fileno()

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self.crc = zlib.crc32(view, self.crc)
        rest = view
        try:
            while rest:  # a signal or a full disk may shorten a write
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            self.failed = error
            raise
        return len(view)

    def close(self) -> None:
        self._file.close()
        super().close()


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
    return _assemble([path])


def read_step(folder: Path, prompt_ids: Collection[str] | None = None) -> list[Rollout]:
    """The rollouts of a step's folder, whichever ranks recorded them, in training order; each once.

    ``prompt_ids``: only theirs. Files that hold none of them are not read.
    """
    return read_files(step_files(folder), prompt_ids)


def read_files(files: Sequence[Path], prompt_ids: Collection[str] | None = None) -> list[Rollout]:
    """As ``read_step``, of some of a step's files."""
    if prompt_ids is not None:
        files = [path for path in files if _names(path) & set(prompt_ids)]
    rollouts = _assemble(files)
    return _in_training_order(one for one in rollouts if prompt_ids is None or one.prompt_id in prompt_ids)


def read_skeletons(files: Sequence[Path]) -> list[Rollout]:
    """The rollouts of some of a step's files without arrays: lengths, grades and finish reasons, as
    ``read_files``. It costs what their number costs, not their tokens: checksums are not looked at. Prompts
    have neither tokens nor golds."""
    return _in_training_order(_assemble(files, SKELETON))


def read_prompts(files: Sequence[Path]) -> list[Prompt]:
    """The whole prompts of some of a step's files, in the order in which they were drawn."""
    assembly, columns = Assembly(), (*SKELETON, "token_ids", "gold")
    for path in files:
        for batch in _batches(path, columns, _places(path, {(name, None) for name in _names(path)})):
            for row in from_batch(batch):
                if row["role"] == PROMPT:
                    assembly.take(row)
    return sorted(assembly.prompts.values(), key=lambda prompt: prompt.number)


def fill_token_ids(skeletons: Sequence[Rollout], files: Sequence[Path]) -> None:
    """Read the token ids of some of the rollouts that ``read_skeletons`` found in ``files``."""
    rows: set[RowKey] = {row for one in skeletons for row in (rollout_key(one), (one.prompt_id, None))}
    whole = {rollout_key(one): one for one in _assemble(files, (*SKELETON, "token_ids"), rows)}
    for skeleton in skeletons:
        segments = zip(skeleton.segments(), whole[rollout_key(skeleton)].segments(), strict=True)
        for segment, found in segments:
            segment.token_ids = found.token_ids


def _in_training_order(rollouts: Iterable[Rollout]) -> list[Rollout]:
    return sorted(rollouts, key=training_order)


def set_aside_stale(folder: Path, policy_version: int) -> None:
    """Rename a step's record if weights of another version generated it.

    So it is where a run has gone back to a checkpoint, and an update that was skipped before was taken now.
    """
    found = {rollout.policy_version for rollout in read_skeletons(step_files(folder))}
    if found - {policy_version}:
        aside = unused(folder.with_name(f"stale-{folder.name}"))
        folder.rename(aside)
        logger.warning(
            "%s: generated with policy version %s, but this run is at %d: set aside as %s",
            folder,
            ", ".join(map(str, sorted(found))),
            policy_version,
            aside.name,
        )


def step_files(folder: Path) -> list[Path]:
    """A step's recorded files. Raises ValueError where they are of an older version."""
    if old := sorted(folder.glob(OLD_FILES)):
        raise _other_version(old[0], OLD_VERSION)
    return _in_order(folder.glob(FILES))


def _in_order(files: Iterable[Path]) -> list[Path]:
    """``rank-0``, ``rank-1``, ``rank-0-2``: first attempts first."""
    return sorted(files, key=lambda path: (len(path.name), path.name))


def read_grades(folder: Path) -> dict[tuple[str, int, int], Grade]:
    """All grades of a step's folder, by prompt_id, index and number of the segment."""
    grades: dict[tuple[str, int, int], Grade] = {}
    for path in _in_order(folder.glob(GRADE_FILES)):
        table = pa.ipc.open_file(pa.memory_map(str(path))).read_all()
        _check_version(path, table.schema)
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
    table = pa.Table.from_batches(list(_batches(path)), SEGMENTS)
    roles = table["role"].to_pylist()
    table = table.filter(pa.array([role not in (PROMPT, END) for role in roles]))
    table = table.select(SEGMENTS.names[: SEGMENTS.names.index("question")])
    grades, keys = read_grades(path.parent), ("prompt_id", "index", "number")
    found = [grades.get(key) for key in zip(*(table[name].to_pylist() for name in keys), strict=True)]
    for name, values in {
        "step": [path.parent.name] * len(found),
        "reward": [grade and grade.reward for grade in found],
        "verdict": [grade and grade.verdict for grade in found],
    }.items():
        table = table.append_column(name, pa.array(values, pa.float64() if name == "reward" else pa.string()))
    return table


# ---- reading ---------------------------------------------------------------------------------------------


def _assemble(
    files: Sequence[Path], columns: Sequence[str] | None = None, wanted: set[RowKey] | None = None
) -> list[Rollout]:
    """The rollouts of files of one folder, of all or only the ``wanted`` rows."""
    assembly = Assembly(read_grades(files[0].parent) if files else {})
    for path in files:
        for batch in _batches(path, columns, None if wanted is None else _places(path, wanted)):
            for row in from_batch(batch):
                if wanted is None or (row["prompt_id"], row["index"]) in wanted:
                    assembly.take(row)
    return list(assembly.rollouts.values())


def _names(path: Path) -> set[str]:
    """Ids of the prompts in a file; no other column is decompressed."""
    return {name for batch in _batches(path, ["prompt_id"]) for name in batch.column(0).unique().to_pylist()}


def _places(path: Path, wanted: set[RowKey]) -> list[int]:
    """Where the batches begin that hold any of the rows."""
    return [
        place
        for place, batch in _placed(path, ["prompt_id", "index"])
        if not wanted.isdisjoint(zip(*(column.to_pylist() for column in batch.columns), strict=True))
    ]


def _batches(
    path: Path, columns: Sequence[str] | None = None, places: Iterable[int] | None = None
) -> Iterator[pa.RecordBatch]:
    """As ``_placed``, without the places."""
    return (batch for _, batch in _placed(path, columns, places))


def _placed(
    path: Path, columns: Sequence[str] | None = None, places: Iterable[int] | None = None
) -> Iterator[tuple[int, pa.RecordBatch]]:
    """The whole batches of a file, each after the place where it begins.

    ``columns``: only these, from what of the file they need; without it everything, if the file's checksum
    is right. ``places``: only the batches that begin there.
    """
    data = _mapped(path)
    if columns is None:
        _check_crc(path, data)
    source, end = pa.BufferReader(pa.py_buffer(data)), 0
    wanted = SEGMENTS.names if columns is None else columns
    fields = [number for number, name in enumerate(SEGMENTS.names) if name in wanted]
    try:
        _check_version(path, pa.ipc.read_schema(source))
        source.seek(0)
        stream = pa.ipc.open_stream(source, options=pa.ipc.IpcReadOptions(included_fields=fields))
        for place in _each(source) if places is None else places:
            source.seek(place)
            batch = stream.read_next_batch()
            end = source.tell()
            yield place, batch
    except StopIteration:
        pass
    except (pa.ArrowException, OSError) as error:
        if _closed(data):
            raise ValueError(f"{path}: damaged: {error}") from None
    if places is None and not _closed(data) and end < len(data):
        logger.warning("%s: dropped a torn end of %d bytes", path, len(data) - end)


def _each(source: pa.BufferReader) -> Iterator[int]:
    """Where a stream of batches is, time and again."""
    while True:
        yield source.tell()


def _mapped(path: Path) -> memoryview:
    """The file's bytes. Raises ValueError where they are no record, or not what was written."""
    if path.suffix == ".jsonl":
        raise _other_version(path, OLD_VERSION)
    data = memoryview(pa.memory_map(str(path)).read_buffer() if path.stat().st_size else b"").cast("B")
    if data[:4] != CONTINUES[: len(data)]:
        raise ValueError(f"{path}: expected rollouts (an Arrow IPC stream), found {bytes(data[:20])!r}")
    return data


def _check_crc(path: Path, data: memoryview) -> None:
    if _closed(data) and data[-4:] != _crc_bytes(zlib.crc32(data[: -len(CLOSED) - 4])):
        raise ValueError(f"{path}: damaged: expected the checksum that its end holds, found another")


def _closed(data: memoryview) -> bool:
    """Whether the file was written to its end."""
    return data[-len(CLOSED) - 4 : -4] == CLOSED


def _crc_bytes(crc: int) -> bytes:
    return crc.to_bytes(4, "little")


def _check_version(path: Path, schema: pa.Schema) -> None:
    found = (schema.metadata or {}).get(VERSION_KEY.encode(), b"none").decode()
    if found != str(VERSION):
        raise _other_version(path, found)


def _other_version(path: Path, found: str) -> ValueError:
    return ValueError(
        f"{path}: expected recorded rollouts of format version {VERSION} ({FILES}), found version {found}: "
        f"read it with the release that wrote it, or remove it and the step is generated again"
    )
