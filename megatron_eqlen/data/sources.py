"""A recipe's source -> its rows: picks the reader and applies the filters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from megatron_eqlen.data import competitions, deepmath, jsonl, livecodebench, opencodereasoning, prepared
from megatron_eqlen.data.filters import Exclusion, filter_rows, read_exclusion
from megatron_eqlen.data.rows import Problem, Tally
from megatron_eqlen.plugins import is_import_path, load_object
from megatron_eqlen.recipe import BenchmarkRecipe, SourceRecipe

Reader = Callable[[Path, Tally], Iterator[Problem]]
"""(a file or folder, where to count what is left out) -> the rows, streamed."""

PLAIN_READERS: dict[str, Reader] = {
    "deepmath": deepmath.read,
    "jsonl": jsonl.read,
    "prepared": prepared.read,
    "aime25": competitions.read_aime25,
    "hmmt25": competitions.read_hmmt25,
}


def open_source(source: SourceRecipe, tally: Tally) -> Sequence[Problem]:
    """The rows of ``source`` that pass its filters; a prepared file stays on disk.

    Raises ValueError if no row does.
    """
    if source.reader == "prepared":
        path = Path(source.path)
        whole = prepared.PreparedRows(path)
        kept = {row.row_id for row in _filtered(source, prepared.usable(whole, path, tally), tally)}
        numbers = [number for number, row_id in enumerate(whole.row_ids()) if row_id in kept]
        rows: Sequence[Problem] = prepared.Selection(whole, numbers)
    else:
        rows = list(read_source(source, tally))
    if not rows:
        raise ValueError(f"data source {source.name}: {source.path}: no usable row: {tally.report()}")
    return rows


def read_source(source: SourceRecipe, tally: Tally) -> Iterator[Problem]:
    """The rows of ``source`` that pass its filters, streamed."""
    path = Path(source.path)
    if source.reader == "opencodereasoning":
        rows = opencodereasoning.read(path, tally, source.split, source.tests)
    else:
        rows = _reader(source.reader)(path, tally)
    return _filtered(source, rows, tally)


def read_problems(benchmark: BenchmarkRecipe, tally: Tally) -> Iterator[Problem]:
    """The rows of a benchmark, unfiltered but for its dates."""
    path = Path(benchmark.path)
    if benchmark.reader == "livecodebench":
        return livecodebench.read(path, tally, benchmark.since, benchmark.until)
    return _reader(benchmark.reader)(path, tally)


def _reader(name: str) -> Reader:
    """A reader of this package, or a user's own by import path."""
    return load_object(name, "reader") if is_import_path(name) else PLAIN_READERS[name]


def _filtered(source: SourceRecipe, rows: Iterator[Problem], tally: Tally) -> Iterator[Problem]:
    exclusion: Exclusion | None = read_exclusion(Path(source.exclude)) if source.exclude else None
    return filter_rows(rows, tally, source.min_difficulty, source.max_difficulty, exclusion)
