"""Opens a recipe's source: picks the reader and applies the filters."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from megatron_eqlen.data import jsonl, livecodebench, opencodereasoning, prepared, reasoning_gym
from megatron_eqlen.data.files import refuse_half_pairs
from megatron_eqlen.data.filters import Exclusion, filter_rows, read_questions
from megatron_eqlen.data.rows import Problem, Tally
from megatron_eqlen.recipe import ANY_COLUMNS, BenchmarkRecipe, SourceRecipe
from megatron_eqlen.recipe.inputs import data_files, local_path
from megatron_eqlen.recipe.plugins import is_import_path, load_object
from megatron_eqlen.rewards.functions import own_code

log = logging.getLogger(__name__)

Reader = Callable[[Path, Tally], Iterator[Problem]]
"""(file or folder, tally of the rows left out) -> the rows, streamed."""

PLAIN_READERS: Mapping[str, Reader] = dict.fromkeys(ANY_COLUMNS, jsonl.read) | {
    "aime25": jsonl.read_aime,
    "aime26": jsonl.read_aime,
    "prepared": prepared.read,
    "reasoning_gym": reasoning_gym.read,
}


def open_source(source: SourceRecipe, tally: Tally) -> Sequence[Problem]:
    """Return the rows of ``source`` that pass its filters; a prepared file stays on disk.

    Raises ValueError if no row does.
    """
    if source.keep_duplicates and source.reader in ("prepared", "reasoning_gym"):
        raise ValueError(f"data source {source.name}: keep_duplicates has no effect with {source.reader}")
    # these two are not read whole
    if source.reader == "prepared":
        rows = _open_prepared(source, tally)
    elif source.reader == "reasoning_gym" and not has_filters(source):
        rows = reasoning_gym.TaskRows(local_path(source))
    else:
        rows = list(read_source(source, tally))
    if not rows:
        raise ValueError(f"data source {source.name}: {source.path}: {tally.unusable()}")
    if tally.dropped:
        log.warning("data source %s: %s", source.name, tally.summary(len(rows)))
    return rows


def _open_prepared(source: SourceRecipe, tally: Tally) -> Sequence[Problem]:
    """Return the rows of a prepared file that pass the filters; the file holds no question twice. Filters
    read questions but no golds, which are most of the file."""
    stored = prepared.PreparedRows(local_path(source))
    if not has_filters(source):
        return stored
    kept = {row.row_id for row in _filtered(source, stored.without_golds(), tally)}
    numbers = [number for number, row_id in enumerate(stored.row_ids()) if row_id in kept]
    return prepared.PreparedRows(local_path(source), numbers)


def has_filters(source: SourceRecipe) -> bool:
    return any(value is not None for value in (source.min_difficulty, source.max_difficulty, source.exclude))


def read_source(source: SourceRecipe, tally: Tally) -> Iterator[Problem]:
    """Yield the rows of ``source`` that pass its filters, streamed."""
    if source.reader == "opencodereasoning":
        rows = opencodereasoning.read(local_path(source), tally, source.split, source.tests)
    else:
        rows = _read(source, tally)
    return _filtered(source, rows, tally)


def read_problems(benchmark: BenchmarkRecipe, tally: Tally) -> Iterator[Problem]:
    """Yield the rows of a benchmark, filtered by its dates only."""
    if benchmark.reader == "livecodebench":
        return livecodebench.read(local_path(benchmark), tally, benchmark.since, benchmark.until)
    return _read(benchmark, tally)


def _read(section: SourceRecipe | BenchmarkRecipe, tally: Tally) -> Iterator[Problem]:
    """Yield the rows of the section's path, or of the files that its ``config`` and ``split`` choose."""
    reader: Callable[..., Iterator[Problem]] = _reader(section.reader)
    if section.reader in ANY_COLUMNS:
        reader = partial(reader, columns=section.columns, grader=section.grader)
    files, path = data_files(section), local_path(section)
    if files is None:
        yield from reader(path, tally)
        return
    for file in files:
        folder = file.relative_to(path).parent
        for row in reader(file, tally):
            yield replace(row, row_id=(folder / row.row_id).as_posix())


def _reader(name: str) -> Reader:
    """Return a reader of this package, or a user's own by import path, whose rows are checked."""
    if not is_import_path(name):
        return PLAIN_READERS[name]
    return partial(_read_own, name, load_object(name, "reader"))


def _read_own(name: str, reader: Reader, path: Path, tally: Tally) -> Iterator[Problem]:
    """Yield the rows of the user's own ``reader``. Raises ValueError for an error in it, and for a row of
    another type or with half a surrogate pair."""
    with own_code(name):
        for row in reader(path, tally):
            if not isinstance(row, Problem):
                raise TypeError(f"expected rows of the type Problem, found {row!r:.80}")
            try:
                refuse_half_pairs(vars(row))
            except ValueError as error:
                raise ValueError(f"{path}: {row.row_id!r}: {error}") from None
            yield row


def _filtered(source: SourceRecipe, rows: Iterator[Problem], tally: Tally) -> Iterator[Problem]:
    exclusion = Exclusion(read_questions(Path(source.exclude))) if source.exclude else None
    return filter_rows(
        rows, tally, source.min_difficulty, source.max_difficulty, exclusion, source.keep_duplicates
    )
