"""The rows that every reader yields, and the count of rows left out. A reader is a generator ``read(path,
tally, ...)`` over one data set's files: it streams, checks every field, and leaves out a bad row with its
file, number and reason. A fault of a whole file is an error (``files.py``)."""

from __future__ import annotations

import contextlib
import logging
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any

from megatron_eqlen.graders.code.tests import CodeTests
from megatron_eqlen.hf.tokenizer import Turn

log = logging.getLogger(__name__)

DEMONSTRATION = "demonstration"
"""Name in place of a grader's: the answer is a whole response, which supervised training imitates."""
REMEDIES = dict.fromkeys(("missing_column", "empty_field"), "data.sources[].columns takes other names") | {
    "wrong_type": "data.sources[].columns reaches into records (answer.value), an own data.sources[].grader "
    "takes answers of any type",
    "bad_messages": "data.sources[].columns: {question: COLUMN} takes another",
    "two_questions": "data.sources[].columns: {question: COLUMN} picks one",
    "no_difficulty": "data.sources[].columns: {difficulty: COLUMN}, or neither min_ nor max_difficulty",
    "unrendered_key": "the chat template must write all of a turn; rows of one response keep thinking",
    "refused_by_template": "the chat template must take the roles: see data.instruction_role",
    "rendered_chat": "data.sources[].columns: {question: COLUMN} of plain text, or of turns",
    "unknown_grader": "data.sources[].grader names one for all rows",
    "unparseable_gold": "data.sources[].grader: module:function grades what is no mathematics",
    "gold_timeout": "data.sources[].grader: module:function grades what is no mathematics",
    "not_an_aime_answer": "data.sources[].reader: jsonl takes any answer",
    "too_long": "raise data.max_prompt_length",
    "long_row": "raise packing.max_tokens_per_row, up to the model's context",
    "no_response": "data.sources[].columns: {answer: COLUMN} takes the response from there",
    "changed_turns": "a chat template that writes each turn once, or rows of one response",
    "bad_tests": "docs/models_and_data.md has the form of tests",
}
"""Faults for which a row is left out, and what helps. Other reasons are the recipe's or a data set's."""


@dataclass(frozen=True)
class Problem:
    """One question before it is formatted."""

    row_id: str
    """File and number, for example ``train-00000.parquet#17``; unique in its source."""
    question: str
    gold: str
    """Reference for the grader, as in ``Prompt.gold``."""
    grader: str = "math"
    difficulty: float | None = None
    """Difficulty on the data set's own scale."""
    instruction: str | None = None
    """Replaces the recipe's instruction; None: the recipe's."""
    gold_checked: bool = False
    """True if the gold is known to parse and to equal itself."""
    messages: tuple[Turn, ...] | None = None
    """The prompt's turns, where they are more than the question; the question is then their text."""

    @property
    def asked(self) -> str:
        """The question without a chat's system turn."""
        question = self.question
        for turn in self.messages or ():
            question = question.removeprefix(f"system: {turn['content']}\n\n")
        return question.removeprefix("user: ") if self.messages else question


@dataclass
class Tally:
    """Rows kept, and rows left out by reason; the first of each reason is logged as it is found."""

    kept: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    first: dict[str, str] = field(default_factory=dict)
    """For each reason the first row and what was found there; not kept in checkpoints."""
    notes: list[str] = field(default_factory=list[str])
    """Sentences on how the files were read."""
    section: str = "data.sources[]"
    """Section of the recipe that names the files."""

    def note(self, text: str) -> None:
        if text and text not in self.notes:
            self.notes.append(text)

    def drop(self, where: str, reason: str, detail: str = "") -> None:
        if not self.dropped[reason]:
            self.first[reason] = f"{where}: {detail}" if detail else where
            log.warning("%s: left out: %s%s", where, BadRow(reason, detail), self.remedy(reason))
        self.dropped[reason] += 1

    def usable(self, kept: int) -> float:
        """Return the share of ``kept`` rows among these and those left out by a fault."""
        return kept / max(1, kept + sum(self.dropped[reason] for reason in REMEDIES))

    def unusable(self, kept: int = 0) -> str:
        """Return why only ``kept`` rows can be used, with the first row and remedy of the main fault."""
        text = f"{'too few usable rows' if kept else 'no usable row'}: {self.summary(kept)}"
        # A fault that has a remedy comes before a filter's reason, then the most frequent one.
        fault = max(self.dropped, key=lambda each: (each in REMEDIES, self.dropped[each]), default="")
        text += f"; the first {fault} is {self.first.get(fault)}" * (fault in self.first)
        return text + self.remedy(fault)

    def summary(self, kept: int) -> str:
        """Return how many rows were left out beside ``kept`` ones, the most frequent reason first."""
        left_out = self.dropped.total()
        if not kept + left_out:
            return "the files hold no row"
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in self.dropped.most_common())
        return f"{left_out:,} of {kept + left_out:,} rows are left out" + f": {reasons}" * bool(reasons)

    def remedy(self, reason: str) -> str:
        """Return what helps against a fault, as the end of a sentence."""
        return f"; {REMEDIES[reason]}".replace("data.sources[]", self.section) if reason in REMEDIES else ""


class BadRow(ValueError):
    """A row that cannot be used. ``reason`` is the name that is counted, ``detail`` what was found."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason} ({detail})" if detail else reason)
        self.reason = reason
        self.detail = detail


def numbered(path: Path, file: Path, records: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    """Yield (row id, record) for each record of ``file``, named relative to the source's ``path``."""
    name = file.relative_to(path).as_posix() if file != path else file.name
    for number, record in enumerate(records):
        yield f"{name}#{number}", record


def text_field(record: Any, name: str) -> str:
    """Return the non-empty text in ``record[name]``. Raises BadRow."""
    value = field_of(record, name)
    if not isinstance(value, str):
        raise BadRow("wrong_type", f"{name}: expected text, found {_kind(value)}")
    if not value.strip():
        raise BadRow("empty_field", f"{name}: expected text, found none")
    return value


def optional_text_field(record: Any, name: str) -> str | None:
    """Return the text in ``record[name]``, which may be empty; None where there is none. Raises BadRow."""
    value = record.get(name)
    if value is not None and not isinstance(value, str):
        raise BadRow("wrong_type", f"{name}: expected text, found {_kind(value)}")
    return value


def answer_field(record: Any, name: str) -> str:
    """Return the answer in ``record[name]`` as text; files write numbers, and 70 as 70.0. Raises BadRow."""
    value = field_of(record, name)
    if isinstance(value, list) and len(value) == 1:
        return answer_field({name: value[0]}, name)
    # ``1E+2`` is written 100, and all digits stay.
    if isinstance(value, Decimal):
        text = f"{value:f}"
        return text.rstrip("0").rstrip(".") if "." in text else text
    if isinstance(value, bool) or not isinstance(value, int | float):
        return text_field(record, name)
    if isinstance(value, int):
        return str(value)
    return str(int(value)) if number_field(record, name) == value // 1 else str(value)


def number_field(record: Any, name: str) -> float | None:
    """Return the finite number in ``record[name]``, None where there is none. Raises BadRow."""
    value = record.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BadRow("wrong_type", f"{name}: expected a number, found {_kind(value)}")
    # An integer of 400 digits is too large for a float.
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise BadRow("wrong_type", f"{name}: expected a finite number, found {number}")
    return number


def field_of(record: Any, name: str) -> Any:
    if not isinstance(record, dict):
        raise BadRow("wrong_type", f"expected a record, found {_kind(record)}")
    if name not in record:
        raise BadRow("missing_column", f"expected {name!r}, found {sorted(record)}")
    return record[name]


def _kind(value: Any) -> str:
    if isinstance(value, dict):
        return f"a record of {', '.join(map(str, value))}"
    return "null" if value is None else type(value).__name__


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
