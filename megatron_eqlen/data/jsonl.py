r"""Questions of your own: one a line of a JSON Lines file, or a row of a parquet file.

``{"question": text, "answer": text or integer}`` is graded by ``math``. Optional: ``grader`` (``math``,
``code``, ``rubric``), ``difficulty`` (number), ``instruction`` (replaces the recipe's; "" adds none), and for
``code`` instead of ``answer`` the ``tests`` object of ``rewards/code/tests.py``.

Instead of ``question``, ``messages`` may hold a chat, ``[{"role": "user", "content": text}]``. It is the
prompt as it stands, without the recipe's instruction; a last turn of the assistant is left out, and is the
answer if there is no ``answer``.

DeepMath-103K, AIME 2025 and HMMT February 2025 are such files with other names of columns, ``final_answer``
or ``problem``, in any of the versions in circulation (math-ai, opencompass, MathArena).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from megatron_eqlen.data.code_rows import code_row, reading_tests
from megatron_eqlen.data.files import column_names, find_files, read_records
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
from megatron_eqlen.hf.tokenizer import Turn
from megatron_eqlen.rewards.code.tests import CodeTests
from megatron_eqlen.rewards.math.answer import normalize

GRADERS = ("math", "code", "rubric")
_AIME_ANSWER = re.compile(r"(\d{1,3})(?:\\unit\{(?!base)[^{}]*\})?")
"""An integer from 0 to 999 in normal form, with or without a unit."""

FIELDS = ("question", "answer", "messages", "grader", "difficulty", "instruction", "tests")
ROLES = ("system", "user", "assistant", "tool")


def read(path: Path, tally: Tally, columns: Mapping[str, str] = MappingProxyType({})) -> Iterator[Problem]:
    """Yield the rows of a ``.jsonl``, ``.parquet`` or ``.json`` file, or of a folder of them. ``columns``:
    names of the file's columns by our names, where they differ."""
    wanted = dict.fromkeys(columns.get(name, name).partition(".")[0] for name in FIELDS)
    for file in find_files(path, "*.jsonl", "*.parquet", "*.json"):
        names = column_names(file)
        for row_id, record in numbered(path, file, read_records(file, (), wanted)):
            try:
                yield _row(row_id, record, columns, names)
            except BadRow as bad:
                tally.drop(f"{path}: {row_id}", bad.reason, bad.detail)


def read_aime25(path: Path, tally: Tally) -> Iterator[Problem]:
    """Yield the rows of AIME 2025. Golds are integers from 0 to 999 without leading zeros and units: ``070``
    and ``70^\\circ`` are both 70."""
    for row in read(path, tally, {"question": "problem"}):
        if integer := _AIME_ANSWER.fullmatch(normalize(row.gold)):
            yield replace(row, gold=integer[1])
        else:
            tally.drop(f"{path}: {row.row_id}", "not_an_aime_answer", f"expected 0..999, found {row.gold!r}")


def _renamed(record: Any, columns: Mapping[str, str]) -> Any:
    """Return the record with the values of ``columns`` under our names."""
    if not isinstance(record, dict):
        return record
    values = {name: _at(record, column.split(".")) for name, column in columns.items()}
    return record | {name: value for name, value in values.items() if value is not None}


def _at(value: Any, keys: Sequence[str]) -> Any:
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _row(row_id: str, record: Any, columns: Mapping[str, str], names: list[str] | None) -> Problem:
    fields, messages = _renamed(record, columns), None
    if isinstance(fields, dict):
        if fields.get("question") is None and fields.get("messages") is not None:
            messages, reply = _chat(fields["messages"])
            fields = fields | {"question": _transcript(messages), "instruction": ""}
            if reply is not None and fields.get("answer") is None:
                fields["answer"] = reply
        _require(fields, columns, names or sorted(record))
    question = text_field(fields, "question")
    grader = fields.get("grader") or "math"
    if grader not in GRADERS:
        raise BadRow("unknown_grader", f"expected one of {GRADERS}, found {grader!r}")
    instruction = optional_text_field(fields, "instruction")
    difficulty = number_field(fields, "difficulty")
    if grader == "code":
        with reading_tests():
            tests = CodeTests.from_fields(field_of(fields, "tests"))
        return replace(code_row(row_id, question, tests, difficulty, instruction), messages=messages)
    answer = answer_field(fields, "answer")
    return Problem(row_id, question, answer, grader, difficulty, instruction, messages=messages)


def _require(fields: dict[str, Any], columns: Mapping[str, str], names: list[str]) -> None:
    """Raise BadRow, with the file's names of columns, if ``fields`` lack a question or what grades it."""
    graded_by = "tests" if fields.get("grader") == "code" else "answer"
    for accepted in (("question", "messages"), (graded_by,)):
        if accepted[0] not in fields:
            wanted = " or ".join(repr(columns.get(name, name)) for name in accepted)
            detail = f"expected {wanted}, found {names}"
            raise BadRow("missing_column", f"{detail}; data.sources[].columns takes other names")


def _chat(value: Any) -> tuple[tuple[Turn, ...], str | None]:
    """Return the turns before the assistant's last one, and that one's text. Raises BadRow."""
    turns = value if isinstance(value, list) else []
    for turn in turns:
        content = turn.get("content") if isinstance(turn, dict) else None
        if not isinstance(content, str) or turn.get("role") not in ROLES:
            raise BadRow("bad_messages", f"expected a role of {ROLES} and content, found {turn!r:.200}")
    messages = tuple({"role": turn["role"], "content": turn["content"]} for turn in turns)
    reply = messages[-1]["content"] if messages and messages[-1]["role"] == "assistant" else None
    messages = messages if reply is None else messages[:-1]
    if not messages or messages[-1]["role"] not in ("user", "tool"):
        raise BadRow("bad_messages", f"expected turns that end with the user's, found {value!r:.200}")
    return messages, reply


def _transcript(messages: Sequence[Turn]) -> str:
    """Return the chat as text, for filters, graders and reports."""
    if len(messages) == 1:
        return messages[0]["content"]
    return "\n\n".join(f"{turn['role']}: {turn['content']}" for turn in messages)
