"""The sets that hold the tests of OpenCodeReasoning's problems: TACO, APPS, CodeContests, Codeforces.

Each ``read_*`` turns one record of a set into its question and tests. Raises BadRow with the reason.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_eqlen.data.code_prompts import code_question
from megatron_eqlen.data.code_rows import reading_tests
from megatron_eqlen.data.files import find_files, read_records
from megatron_eqlen.data.rows import BadRow, number_field, text_field
from megatron_eqlen.rewards.code_tests import CodeTests


@dataclass(frozen=True)
class SourceSet:
    """One set of problems: its folder under the tests folder, and how a record is read."""

    folder: str
    columns: tuple[str, ...]
    optional: tuple[str, ...]
    statement: Callable[[dict[str, Any]], str]
    """The text that OpenCodeReasoning's ``input`` repeats."""
    tests: Callable[[dict[str, Any]], CodeTests]

    def records(self, tests: Path, split: str) -> Iterator[dict[str, Any]]:
        """The records of ``split`` in the set's own order, streamed."""
        folder = tests / self.folder
        if not folder.is_dir():
            raise ValueError(
                f"data tests: {folder}: expected a folder with {self.folder}'s files, found none"
            )
        for file in find_files(folder, f"{split}*.parquet", f"{split}*.jsonl"):
            yield from read_records(file, self.columns, self.optional)


def question_and_tests(source: SourceSet, record: dict[str, Any]) -> tuple[str, CodeTests]:
    """Question and tests of one record. Raises BadRow."""
    with reading_tests():
        tests = source.tests(record)
    return code_question(source.statement(record), tests.function, record.get("starter_code") or ""), tests


def _input_output_tests(record: dict[str, Any]) -> CodeTests:
    """APPS and TACO: a JSON text ``{inputs, outputs[, fn_name]}``, often empty."""
    text = record.get("input_output")
    held = json.loads(text) if isinstance(text, str) and text.strip() else {}
    if not isinstance(held, dict) or not held.get("inputs"):
        raise BadRow("no_tests")
    function = held.get("fn_name")
    inputs, outputs = held["inputs"], held.get("outputs")
    if not isinstance(inputs, list) or not isinstance(outputs, list):
        raise BadRow("bad_tests", "inputs and outputs: expected lists")
    if function is None:
        inputs, outputs = [_joined(one) for one in inputs], [_joined(one) for one in outputs]
    return CodeTests(inputs, outputs, function, wrapped=function is not None)


def _joined(text: Any) -> Any:
    """Some problems give stdin as a list of lines."""
    return "\n".join(map(str, text)) if isinstance(text, list) else text


def _code_contests_tests(record: dict[str, Any]) -> CodeTests:
    """CodeContests: three structs of ``{input[], output[]}``."""
    inputs: list[str] = []
    outputs: list[str] = []
    for name in ("public_tests", "private_tests", "generated_tests"):
        held = _typed(record.get(name) or {}, dict, name)
        inputs += _typed(held.get("input") or [], list, f"{name}.input")
        outputs += _typed(held.get("output") or [], list, f"{name}.output")
    if not inputs:
        raise BadRow("no_tests")
    limit = _typed(record.get("time_limit") or {}, dict, "time_limit")
    seconds = (number_field(limit, "seconds") or 0) + (number_field(limit, "nanos") or 0) / 1e9
    return CodeTests(inputs, outputs, time_limit=seconds or None)


def _codeforces_tests(record: dict[str, Any]) -> CodeTests:
    """open-r1/codeforces: a list of ``{input, output}``; several right answers need a checker: left out."""
    if record.get("generated_checker"):
        raise BadRow("needs_checker")
    held = _typed(record.get("official_tests") or [], list, "official_tests")
    if not held:
        raise BadRow("no_tests")
    for test in held:
        _typed(test, dict, "official_tests")
    memory = number_field(record, "memory_limit")
    return CodeTests(
        [test.get("input") for test in held],
        [test.get("output") for test in held],
        time_limit=number_field(record, "time_limit"),
        memory_mb=None if memory is None else math.ceil(memory),
    )


def _typed(value: Any, kind: type, name: str) -> Any:
    if not isinstance(value, kind):
        raise BadRow("bad_tests", f"{name}: expected a {kind.__name__}, found {type(value).__name__}")
    return value


def _question(record: dict[str, Any]) -> str:
    return text_field(record, "question")


def _description(record: dict[str, Any]) -> str:
    return text_field(record, "description")


APPS_COLUMNS = ("question", "input_output")
SOURCE_SETS = {
    "taco": SourceSet("taco", APPS_COLUMNS, ("starter_code",), _question, _input_output_tests),
    "apps": SourceSet("apps", APPS_COLUMNS, ("starter_code",), _question, _input_output_tests),
    "code_contests": SourceSet(
        "code_contests",
        ("description", "public_tests", "private_tests", "generated_tests"),
        ("time_limit",),
        _description,
        _code_contests_tests,
    ),
    "open-r1/codeforces": SourceSet(
        "codeforces",
        ("description", "official_tests"),
        ("generated_checker", "time_limit", "memory_limit"),
        _description,
        _codeforces_tests,
    ),
}
"""By the name in OpenCodeReasoning's ``dataset`` column."""
