"""Code problems as rows: the tests of every reader are checked in one place, when the row is read."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from megatron_eqlen.data.rows import BadRow, Problem
from megatron_eqlen.rewards.code.tests import CodeTests


@contextlib.contextmanager
def reading_tests() -> Iterator[None]:
    """Turn an error in reading or making tests into a BadRow ``bad_tests``."""
    try:
        yield
    except BadRow:
        raise
    except (ValueError, OverflowError, RecursionError) as error:
        raise BadRow("bad_tests", f"{error}"[:400]) from None


def code_row(
    row_id: str,
    question: str,
    tests: CodeTests,
    difficulty: float | None = None,
    instruction: str | None = "",
) -> Problem:
    """Return a row graded by ``code``. Its question states the answer format, so no instruction is added."""
    return Problem(row_id, question, tests.to_json(), "code", difficulty, instruction, gold_checked=True)
