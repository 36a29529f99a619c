"""Opens a recipe's source: picks the reader and applies the filters."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from megatron_eqlen.data import jsonl, livecodebench, prepared
from megatron_eqlen.data.files import refuse_half_pairs
from megatron_eqlen.data.filters import filter_rows
from megatron_eqlen.data.rows import Problem, Tally
from megatron_eqlen.hf.dataset_files import missing_shards
from megatron_eqlen.recipe import ANY_COLUMNS, BenchmarkRecipe, SourceRecipe
from megatron_eqlen.recipe.inputs import data_files, local_path
from megatron_eqlen.recipe.plugins import load_object
from megatron_eqlen.rewards.functions import own_code

log = logging.getLogger(__name__)

Reader = Callable[[Path, Tally], Iterable[Problem]]
"""(file or folder, tally of the rows left out) -> the rows, streamed, or a sequence that makes them."""

PLAIN_READERS: Mapping[str, Reader] = dict.fromkeys(ANY_COLUMNS, jsonl.read) | {
    "aime25": jsonl.read_aime,
    "aime26": jsonl.read_aime,
    "prepared": lambda path, tally: prepared.PreparedRows(path),
}


def open_source(source: SourceRecipe, tally: Tally) -> Sequence[Problem]:
    """Return the rows of ``source`` that pass its filters. Without filters, a prepared file stays on disk and
    a user's own sequence is not read whole. Raises ValueError if no row passes."""
    rows = _open_prepared(source, tally) if source.reader == "prepared" else read_source(source, tally)
    if isinstance(rows, Sequence) and source.keep_duplicates:
        raise ValueError(f"data source {source.name}: keep_duplicates has no effect with {source.reader}")
    # a stream is read whole: epochs shuffle row numbers
    rows = rows if isinstance(rows, Sequence) else list(rows)
    if not rows:
        raise ValueError(f"data source {source.name}: {source.path}: {tally.unusable()}")
    if tally.dropped:
        log.warning("data source %s: %s", source.name, tally.summary(len(rows)))
    return rows


def _open_prepared(source: SourceRecipe, tally: Tally) -> Sequence[Problem]:
    """Return the rows of a prepared file that pass the filters, which read no golds, most of the file."""
    stored = prepared.PreparedRows(local_path(source))
    if not has_filters(source):
        return stored
    # By id, since filters yield rows without their numbers.
    kept = {row.row_id for row in filter_rows(source, stored.without_golds(), tally)}
    numbers = [number for number, row_id in enumerate(stored.row_ids()) if row_id in kept]
    return prepared.PreparedRows(local_path(source), numbers)


def has_filters(source: SourceRecipe) -> bool:
    return any(value is not None for value in (source.min_difficulty, source.max_difficulty, source.exclude))


def read_source(source: SourceRecipe, tally: Tally) -> Iterable[Problem]:
    """Return the rows of ``source`` that pass its filters, streamed, or a reader's sequence without any."""
    rows = _read(source, tally)
    as_it_is = isinstance(rows, Sequence) and not has_filters(source)
    return rows if as_it_is else filter_rows(source, rows, tally)


def read_problems(benchmark: BenchmarkRecipe, tally: Tally) -> Iterable[Problem]:
    """Return the rows of a benchmark, filtered by its dates only."""
    if benchmark.reader == "livecodebench":
        return livecodebench.read(local_path(benchmark), tally, benchmark.since, benchmark.until)
    return _read(benchmark, tally)


def _read(section: SourceRecipe | BenchmarkRecipe, tally: Tally) -> Iterable[Problem]:
    """Return the rows of the section's path, or of the files that its ``config`` and ``split`` choose."""
    reader: Callable[..., Iterable[Problem]] | None = PLAIN_READERS.get(section.reader)
    reader = reader or partial(_read_own, section.reader, load_object(section.reader, "reader"))
    if section.reader in ANY_COLUMNS:
        reader = partial(reader, columns=section.columns, grader=section.grader)
    files, path = data_files(section), local_path(section)
    names = (file.relative_to(path).as_posix() for file in files or path.rglob("*"))
    if missing := missing_shards(names):
        text = f"not there: {', '.join(missing[:5])}, which the names of other files count"
        if isinstance(section, BenchmarkRecipe):
            raise ValueError(f"benchmark {section.name}: {path}: {text}")
        tally.note(text)
    if files is None:
        return reader(path, tally)
    return (
        # The folder below the path makes a row's id unique among files of one name.
        replace(row, row_id=(file.relative_to(path).parent / row.row_id).as_posix())
        for file in files
        for row in reader(file, tally)
    )


def _read_own(name: str, reader: Reader, path: Path, tally: Tally) -> Iterable[Problem]:
    """Return the rows of the user's own reader, a sequence as it is. Raises ValueError for its errors."""
    with own_code(name):
        rows = reader(path, tally)
    # A list or tuple is checked like a stream; another sequence makes its rows when they are asked for.
    made = isinstance(rows, Sequence) and not isinstance(rows, list | tuple)
    return rows if made else _checked(name, rows, path)


def _checked(name: str, rows: Iterable[Problem], path: Path) -> Iterator[Problem]:
    """Yield the rows of a user's own reader. Raises ValueError for an error in it, or in a row."""
    with own_code(name):
        for row in rows:
            if not isinstance(row, Problem):
                raise TypeError(f"expected rows of the type Problem, found {row!r:.80}")
            try:
                refuse_half_pairs(vars(row))
            except ValueError as error:
                raise ValueError(f"{path}: {row.row_id!r}: {error}") from None
            yield row
