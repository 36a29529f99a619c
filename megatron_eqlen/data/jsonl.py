r"""Plain JSON Lines: one question a line.

``{"question": text, "answer": text or integer}`` is graded by ``math``. Optional: ``grader`` (``math``,
``code``, ``rubric``), ``difficulty`` (number), ``instruction`` (replaces the recipe's; "" adds none), and for
``code`` instead of ``answer`` the ``tests`` object of ``rewards/code/tests.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_eqlen.data.code_rows import code_row, reading_tests
from megatron_eqlen.data.files import find_files, read_records
from megatron_eqlen.data.rows import (
    BadRow,
    Problem,
    Tally,
    answer_field,
    field_of,
    number_field,
    numbered,
    optional_text_field,
    text_field,
)
from megatron_eqlen.rewards.code.tests import CodeTests

GRADERS = ("math", "code", "rubric")


def read(path: Path, tally: Tally) -> Iterator[Problem]:
    """Yield the rows of a ``.jsonl`` file, or of a folder of them."""
    for file in find_files(path, "*.jsonl"):
        for row_id, record in numbered(path, file, read_records(file, ())):
            try:
                yield _row(row_id, record)
            except BadRow as bad:
                tally.drop(f"{path}: {row_id}", bad.reason, bad.detail)


def _row(row_id: str, record: Any) -> Problem:
    question = text_field(record, "question")
    grader = record.get("grader", "math")
    if grader not in GRADERS:
        raise BadRow("unknown_grader", f"expected one of {GRADERS}, found {grader!r}")
    instruction = optional_text_field(record, "instruction")
    difficulty = number_field(record, "difficulty")
    if grader == "code":
        with reading_tests():
            tests = CodeTests.from_fields(field_of(record, "tests"))
        return code_row(row_id, question, tests, difficulty, instruction)
    return Problem(row_id, question, answer_field(record, "answer"), grader, difficulty, instruction)
