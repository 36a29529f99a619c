r"""Sets of math problems: DeepMath-103K for training, AIME 2025 and HMMT February 2025 as benchmarks.

DeepMath-103K is parquet files ``data/train-*`` with question, bare LaTeX final_answer, topic and difficulty;
its three R1 solutions are never read. The benchmarks are read in any of the files in circulation:
``problem, answer, id`` (math-ai) · ``question, answer`` in two files (opencompass) · ``problem_idx,
problem, answer`` (MathArena; AIME answers may be integers, HMMT answers are LaTeX). AIME answers are
integers from 0 to 999. They are stored without leading zeros and units: ``070`` and ``70^\circ`` are both 70.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_eqlen.data.files import find_files, read_records
from megatron_eqlen.data.rows import BadRow, Problem, Tally, answer_field, number_field, numbered, text_field
from megatron_eqlen.rewards.math.answer import normalize

_AIME_ANSWER = re.compile(r"(\d{1,3})(?:\\unit\{(?!base)[^{}]*\})?")
"""An integer from 0 to 999 in normal form, with or without a unit: II-5 of 2025 is ``336^\\circ``."""
_DEEPMATH_COLUMNS = ("question", "final_answer", "difficulty")


def read_deepmath(path: Path, tally: Tally) -> Iterator[Problem]:
    """Yield the rows of a DeepMath-103K file, or of a folder of them."""
    for file in find_files(path, "train-*.parquet", "*.parquet"):
        for row_id, record in numbered(path, file, read_records(file, _DEEPMATH_COLUMNS)):
            try:
                yield Problem(
                    row_id,
                    text_field(record, "question"),
                    answer_field(record, "final_answer"),
                    difficulty=number_field(record, "difficulty"),
                )
            except BadRow as bad:
                tally.drop(f"{path}: {row_id}", bad.reason, bad.detail)


def read_aime25(path: Path, tally: Tally) -> Iterator[Problem]:
    """Read AIME 2025; the gold is an integer."""
    for row_id, question, answer in _read(path, tally):
        if integer := _AIME_ANSWER.fullmatch(normalize(answer)):
            yield Problem(row_id, question, integer[1])
        else:
            tally.drop(f"{path}: {row_id}", "not_an_aime_answer", f"expected 0..999, found {answer!r}")


def read_hmmt25(path: Path, tally: Tally) -> Iterator[Problem]:
    """Read HMMT February 2025; the gold is LaTeX."""
    for row_id, question, answer in _read(path, tally):
        yield Problem(row_id, question, answer)


def _read(path: Path, tally: Tally) -> Iterator[tuple[str, str, str]]:
    for file in find_files(path, "*.parquet", "*.jsonl", "*.json"):
        records = read_records(file, ("answer",), optional=("problem", "question"))
        for row_id, record in numbered(path, file, records):
            try:
                yield row_id, _question(record), answer_field(record, "answer").strip()
            except BadRow as bad:
                tally.drop(f"{path}: {row_id}", bad.reason, bad.detail)


def _question(record: Any) -> str:
    return text_field(record, "question" if isinstance(record, dict) and "question" in record else "problem")
