"""Filters for the rows of a source: difficulty, decontamination, duplicates."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from hashlib import blake2b
from math import inf
from pathlib import Path

from megatron_eqlen.data.files import parse_json
from megatron_eqlen.data.rows import Problem, Tally
from megatron_eqlen.recipe import SourceRecipe

OVERLAP_WORDS = 13
"""Words in a row that a question shares with an excluded one to be left out (GPT-3's decontamination)."""

_WORD = re.compile(r"\w+")


def filter_rows(source: SourceRecipe, rows: Iterable[Problem], tally: Tally) -> Iterator[Problem]:
    """Yield the rows that pass the filters, the first of equal questions; count others in ``tally``."""
    excluded = [*read_questions(Path(source.exclude))] if source.exclude else []
    # Whole, since a short question has no run of so many words.
    whole, runs = {*map(_bare, excluded)}, {run for question in excluded for run in word_runs(question)}
    bounded = source.min_difficulty is not None or source.max_difficulty is not None
    lowest = -inf if source.min_difficulty is None else source.min_difficulty
    highest = inf if source.max_difficulty is None else source.max_difficulty
    seen: set[bytes] = set()
    for row in rows:
        # digests: millions of questions fit into memory
        key = blake2b(row.question.strip().encode(), digest_size=16).digest()
        if bounded and row.difficulty is None:
            tally.drop(row.row_id, "no_difficulty")
        elif row.difficulty is not None and not lowest <= row.difficulty <= highest:
            tally.drop(row.row_id, "difficulty", f"{row.difficulty:g} is not in {lowest:g}..{highest:g}")
        elif excluded and (_bare(row.asked) in whole or not runs.isdisjoint(word_runs(row.question))):
            tally.drop(row.row_id, "excluded")
        elif key in seen and not source.keep_duplicates:
            tally.drop(row.row_id, "duplicate")
        else:
            seen.add(key)
            yield row


def read_questions(path: Path) -> Iterator[str]:
    """Yield the questions of a list: one a line, as plain text or as a JSON string."""
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            text = line.decode().strip("\ufeff \t\r")
            question = parse_json(text) if text.startswith('"') else text
            if re.match(r"\{\s*\"|\[\s*[\"{]", text):
                raise ValueError("found a record or a list")
        except ValueError as error:
            raise ValueError(f"{path}: line {number}: expected text or a JSON string: {error}") from None
        if question:
            yield question


def _bare(text: str) -> str:
    return " ".join(_WORD.findall(text.lower()))


def word_runs(text: str) -> Iterator[str]:
    """Yield each ``OVERLAP_WORDS`` consecutive words of a text, without case and signs."""
    words = _WORD.findall(text.lower())
    for start in range(len(words) - OVERLAP_WORDS + 1):
        yield " ".join(words[start : start + OVERLAP_WORDS])
