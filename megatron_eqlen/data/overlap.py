"""Finds benchmark questions in the training data, which would inflate the benchmark's accuracy."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Sequence
from itertools import islice

from megatron_eqlen.data.filters import word_runs
from megatron_eqlen.data.prepared import PreparedRows
from megatron_eqlen.data.rows import Problem, Tally
from megatron_eqlen.data.sources import open_source, read_problems
from megatron_eqlen.recipe import BenchmarkRecipe, DataRecipe, SourceRecipe

IN_PART = 0.5
"""Share of a benchmark question's runs of words that a source must hold to hold it in part; the phrases that
end most problems of an AIME are less."""
_MARKUP = re.compile(r"\s+|\$|\\[()\[\],;:! ]")
"""White space and the marks around and within formulas; copies of a question differ in these."""


def overlaps(
    sources: Iterable[tuple[SourceRecipe, Sequence[Problem]]], benchmarks: Sequence[BenchmarkRecipe]
) -> list[str]:
    """Return a sentence for each source and benchmark that have questions in common, compared whole, without
    white space, markup of formulas and case, and in part, by runs of words (``filters.word_runs``)."""
    # normalized questions by benchmark, each with its runs of words
    asked: dict[str, dict[str, set[str]]] = {}
    for benchmark in benchmarks:
        questions = [row.asked for row in islice(read_problems(benchmark, Tally()), benchmark.limit)]
        asked[benchmark.name] = {_normalized(each): set(word_runs(each)) for each in questions}
    # all benchmarks at once, so that each source is read once
    texts = set[str]().union(*asked.values())
    runs = set[str]().union(*(each for questions in asked.values() for each in questions.values()))
    sentences = []
    for source, rows in sources:
        held, held_runs = set[str](), set[str]()
        # golds are not needed, and rows that a reader's sequence makes are not looked at
        read = rows.without_golds() if isinstance(rows, PreparedRows) else rows
        for row in read if asked and (read is not rows or isinstance(rows, list)) else ():
            held |= texts & {_normalized(row.asked)}
            held_runs |= runs.intersection(word_runs(row.question))
        for name, questions in asked.items():
            whole = held & questions.keys()
            # in part: most of a question's runs of words are in the source
            others = (questions[text] for text in questions.keys() - whole)
            parts = sum(len(each & held_runs) > IN_PART * len(each) for each in others)
            if whole or parts:
                also = f" and most words of {parts} more" * bool(parts)
                sentences.append(
                    f"data source {source.name} holds {len(whole)} of the {len(questions)} questions of "
                    f"benchmark {name}{also}: its accuracy is one of training; leave them out "
                    f"(data.sources[].exclude)"
                )
    return sentences


def read_overlaps(data: DataRecipe, benchmarks: Sequence[BenchmarkRecipe]) -> list[str]:
    """Read a recipe's data and return its ``overlaps``."""
    return overlaps(((source, open_source(source, Tally())) for source in data.sources), benchmarks)


def _normalized(question: str) -> str:
    return _MARKUP.sub("", unicodedata.normalize("NFKC", question)).casefold()
