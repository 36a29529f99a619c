"""Finds benchmark questions in the training data, which would inflate the benchmark's accuracy."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from megatron_eqlen.data.prepared import PreparedRows, Selection
from megatron_eqlen.data.reasoning_gym import TaskRows
from megatron_eqlen.data.rows import Problem, Tally
from megatron_eqlen.data.sources import open_source, read_problems
from megatron_eqlen.recipe import BenchmarkRecipe, DataRecipe, SourceRecipe

_MARKUP = re.compile(r"\s+|\$|\\[()\[\],;:! ]")
"""White space and the marks around and within formulas; copies of a question differ in these."""


def overlaps(
    sources: Iterable[tuple[SourceRecipe, Sequence[Problem]]], benchmarks: Sequence[BenchmarkRecipe]
) -> list[str]:
    """Return a sentence for each source and benchmark that have questions in common.

    Questions are compared without white space, markup of formulas and case.
    """
    asked = {benchmark.name: _benchmark_questions(benchmark) for benchmark in benchmarks}
    wanted = set().union(*asked.values())
    sentences = []
    for source, rows in sources:
        held = wanted.intersection(map(_normalized, _questions(rows))) if wanted else set()
        for benchmark in benchmarks:
            questions = asked[benchmark.name]
            if shared := len(held & questions):
                sentences.append(
                    f"data source {source.name} holds {shared} of the {len(questions)} questions of "
                    f"benchmark {benchmark.name}: its accuracy is one of training; leave them out "
                    f"(data.sources[].exclude)"
                )
    return sentences


def read_overlaps(data: DataRecipe, benchmarks: Sequence[BenchmarkRecipe]) -> list[str]:
    """Read a recipe's data and return its ``overlaps``."""
    return overlaps(((source, open_source(source, Tally())) for source in data.sources), benchmarks)


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
