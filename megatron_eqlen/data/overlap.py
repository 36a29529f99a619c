"""Finds benchmark questions in the training data, which would inflate the benchmark's accuracy."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path

from megatron_eqlen.data.prepared import PreparedRows, Selection, sha256
from megatron_eqlen.data.reasoning_gym import TaskRows
from megatron_eqlen.data.rows import Problem, Tally
from megatron_eqlen.data.sources import has_filters, open_source, read_problems
from megatron_eqlen.recipe import BenchmarkRecipe, DataRecipe, SourceRecipe
from megatron_eqlen.recipe.inputs import data_files, local_path

_MARKUP = re.compile(r"\s+|\$|\\[()\[\],;:! ]")
"""White space and the marks around and within formulas; copies of a question differ in these."""


def overlaps(
    sources: Iterable[tuple[SourceRecipe, Sequence[Problem]]], benchmarks: Sequence[BenchmarkRecipe]
) -> list[str]:
    """Return a sentence for each source and benchmark that have questions, or a whole file, in common.

    Questions are compared without white space, markup of formulas and case.
    """
    asked = {benchmark.name: _benchmark_questions(benchmark) for benchmark in benchmarks}
    wanted = set().union(*asked.values())
    sentences = []
    for source, rows in sources:
        held = wanted.intersection(map(_normalized, _questions(rows))) if wanted else set()
        for benchmark in benchmarks:
            shared = len(held & asked[benchmark.name])
            files = _shared_files(_all_files(source), _all_files(benchmark))
            if shared or (files and not has_filters(source)):
                sentences.append(_sentence(source, benchmark, shared, len(asked[benchmark.name]), files))
    return sentences


def read_overlaps(data: DataRecipe, benchmarks: Sequence[BenchmarkRecipe]) -> list[str]:
    """Read a recipe's data and return its ``overlaps``."""
    return overlaps(((source, open_source(source, Tally())) for source in data.sources), benchmarks)


def _sentence(source: SourceRecipe, benchmark: BenchmarkRecipe, shared: int, asked: int, files: int) -> str:
    text = f"data source {source.name} holds {shared} of the {asked} questions of benchmark {benchmark.name}"
    if files:
        text += f" ({source.path} and {benchmark.path} have {files} equal file{'s' * (files > 1)})"
    return text + ": its accuracy is one of training; leave them out (data.sources[].exclude)"


def _benchmark_questions(benchmark: BenchmarkRecipe) -> set[str]:
    problems = islice(read_problems(benchmark, Tally()), benchmark.limit)
    return {_normalized(problem.question) for problem in problems}


def _questions(rows: Sequence[Problem]) -> Iterator[str]:
    """Yield the questions of ``rows``, without golds of a prepared file. Tasks that are generated are in no
    benchmark's file."""
    if isinstance(rows, TaskRows):
        return iter(())
    read = rows.without_golds() if isinstance(rows, PreparedRows | Selection) else rows
    return (row.question for row in read)


def _normalized(question: str) -> str:
    return _MARKUP.sub("", unicodedata.normalize("NFKC", question)).casefold()


def _shared_files(source: list[Path], benchmark: list[Path]) -> int:
    """Return number of the benchmark's files that the source has too, at the same path or with the same
    bytes."""
    ours = {file.resolve() for file in source}
    sizes = {file.stat().st_size for file in ours}
    shared = 0
    for file in benchmark:
        size = file.stat().st_size
        if file.resolve() in ours:
            shared += 1
        elif size in sizes:
            digest = sha256(file)
            shared += any(sha256(other) == digest for other in ours if other.stat().st_size == size)
    return shared


def _all_files(section: SourceRecipe | BenchmarkRecipe) -> list[Path]:
    if (chosen := data_files(section)) is not None:
        return chosen
    path = local_path(section)
    return [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
