"""Code problems as rows: the question's text, which states the wanted form of the program, and its tests,
which are checked here for every reader when the row is read."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from megatron_eqlen.data.rows import BadRow, Problem
from megatron_eqlen.graders.code.tests import CodeTests

FENCED = "Put the whole program into one fenced block that starts with ```python."
STDIN = (
    "Write a Python program that reads the input from standard input and prints the answer "
    "to standard output. " + FENCED
)
STARTER = (
    "Complete the starter code below without changing its names and arguments. "
    + FENCED
    + "\n\n```python\n{starter}\n```"
)
FUNCTION = (
    "Write a Python function named `{function}` (a method of `class Solution` will do as well). " + FENCED
)


def code_question(statement: str, function: str | None = None, starter: str = "") -> str:
    """Return the question text of a code problem: statement and answer format in one turn."""
    if function is None:
        wanted = STDIN
    elif starter.strip():
        wanted = STARTER.format(starter=starter.strip("\n"))
    else:
        wanted = FUNCTION.format(function=function)
    return f"{statement.strip()}\n\n{wanted}"


@contextlib.contextmanager
def reading_tests() -> Iterator[None]:
    """Turn an error in reading or making tests into a BadRow ``bad_tests``."""
    try:
        yield
    except BadRow:
        raise
    except (ValueError, OverflowError, RecursionError) as error:
        raise BadRow("bad_tests", f"{error}"[:400]) from None


def of_type(value: Any, kind: type, name: str) -> Any:
    """Return ``value`` if it is a ``kind``. Raises BadRow ``bad_tests``."""
    if not isinstance(value, kind):
        raise BadRow("bad_tests", f"{name}: expected a {kind.__name__}, found {type(value).__name__}")
    return value


def code_row(
    row_id: str,
    question: str,
    tests: CodeTests,
    difficulty: float | None = None,
    instruction: str | None = "",
) -> Problem:
    """Return a row graded by ``code``. Its question states the answer format, so no instruction is added."""
    return Problem(row_id, question, tests.to_json(), "code", difficulty, instruction, gold_checked=True)
