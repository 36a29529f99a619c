"""OpenCodeReasoning: a reader of its questions with tests from the sets that they were taken from.

    tools/prepare_data.py --reader recipes.opencodereasoning:read --path data/opencodereasoning --out FILE

The folder holds ``questions`` (the parquet files of split_0 and split_1, or of one) and ``tests`` with a
folder for each source set: TACO, APPS, CodeContests, Codeforces.

735,255 rows hold 28,319 distinct questions and no tests. One pass over the files collects the distinct
questions (by ``id``); one pass over each source set yields the collected questions that have tests: a split_1
row names its record by ``index``, a split_0 row repeats its text. Both passes stream. A problem without
tests, or one that needs a special checker, is counted and left out: it must never be rewarded.

A test gives stdin and compares stdout as text, or runs the problem's checker (Codeforces alone has them).
Problems that such tests cannot judge are left out: interactive ones, those that read or write a file, those
whose tests are incomplete, and those of the other sets with several right outputs.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

from megatron_eqlen.data.files import find_files, parse_json, read_records
from megatron_eqlen.data.rows import (
    BadRow,
    Problem,
    Tally,
    answer_field,
    code_question,
    code_row,
    number_field,
    numbered,
    of_type,
    optional_text_field,
    reading_tests,
    text_field,
)
from megatron_eqlen.graders.code.tests import CodeTests

INTERACTIVE = re.compile(
    r"(?<!\bnot an )(?<!\bnon-)\binteractive\s+(?:problem|task)\b|\b(?:problem|task)\s+is\s+interactive\b",
    re.I,
)
"""Words of a statement that announce an interactive problem."""
SEVERAL_ANSWERS = re.compile(
    r"""
    \b(?:print|output|report|return|give|write|find)\s+any\s+(?:one\b|
        (?:one\s+)?(?:of\s+(?:them|these|those|the)|such|valid|possible|correct|suitable|optimal|answer|
        solution)\b)
    | \b(?:print|output|report|return|write)\s+any\s*(?:[.,;:()]|$)
    | \b(?:several|multiple|many|more\s+than\s+one)\b[^.]{0,80}\b(?:you\s+(?:can|may)|please)\s+
        (?:choose|select|pick)\s+any\b
    | \bany\s+(?:of\s+them|(?:(?:valid|correct|possible|such|optimal)\s+)?(?:answers?|solutions?|outputs?))
        \s+(?:will\s+be|is|are)\s+(?:accepted|acceptable|allowed|considered)\b
    | \b(?:print|output|return)\b[^.]{0,60}\bin\s+any\s+order\b
    | \b(?:absolute|relative)\s+(?:or\s+(?:absolute|relative)\s+)?(?:error|precision)\b
    | \bwithin\s+\$?10\S{1,8}\s+of\s+the\s+actual\b
    """,
    re.I | re.M | re.X,
)
"""Words of a statement that accept more than one output: any answer, any order, a tolerance."""


@dataclass(frozen=True)
class SourceSet:
    """One set of problems: its folder under ``tests``, and the functions that read a record."""

    folder: str
    columns: tuple[str, ...]
    optional: tuple[str, ...]
    statement: Callable[[dict[str, Any]], str]
    """The text that OpenCodeReasoning's ``input`` repeats."""
    tests: Callable[[dict[str, Any]], CodeTests]
    names_checkers: bool = False
    """The set has a column for checkers, so the statement is not searched for several right answers."""

    def records(self, tests: Path, split: str) -> Iterator[dict[str, Any]]:
        """Yield the records of ``split`` in the set's own order, streamed."""
        folder = tests / self.folder
        if not folder.is_dir():
            raise ValueError(f"{folder}: expected a folder with {self.folder}'s files, found none")
        for file in find_files(folder, f"{split}*.parquet", f"{split}*.jsonl"):
            yield from read_records(file, self.columns, self.optional)


def question_and_tests(source: SourceSet, record: dict[str, Any]) -> tuple[str, CodeTests]:
    """Return question and tests of one record. Raises BadRow."""
    statement = source.statement(record)
    if phrase := INTERACTIVE.search(statement):
        raise BadRow("interactive", f"the statement says {phrase[0]!r}")
    if not source.names_checkers and (phrase := SEVERAL_ANSWERS.search(statement)):
        raise BadRow("needs_checker", f"the statement says {phrase[0]!r}")
    with reading_tests():
        tests = source.tests(record)
    starter = optional_text_field(record, "starter_code") or ""
    return code_question(statement, tests.function, starter), tests


def _input_output_tests(record: dict[str, Any]) -> CodeTests:
    """Read tests of APPS and TACO: a JSON text ``{inputs, outputs[, fn_name]}``, often empty."""
    text = record.get("input_output")
    held = parse_json(text) if isinstance(text, str) and text.strip() else {}
    if not isinstance(held, dict) or not held.get("inputs"):
        raise BadRow("no_tests")
    function = held.get("fn_name")
    inputs, outputs = held["inputs"], held.get("outputs")
    if not isinstance(inputs, list) or not isinstance(outputs, list):
        raise BadRow("bad_tests", "inputs and outputs: expected lists")
    if function is None:
        inputs, outputs = [_joined(text) for text in inputs], [_joined(text) for text in outputs]
    return CodeTests(inputs, outputs, function, rules="apps")


def _joined(text: Any) -> Any:
    """Join lines: some problems give stdin as a list of lines."""
    return "\n".join(map(str, text)) if isinstance(text, list) else text


def _code_contests_tests(record: dict[str, Any]) -> CodeTests:
    """Read tests of CodeContests: three structs of ``{input[], output[]}``; records that name files in place
    of stdin and stdout are refused."""
    for name in ("input_file", "output_file"):
        if file_name := record.get(name):
            raise BadRow("file_input", f"{name} is {file_name!r:.80}, expected none")
    inputs: list[str] = []
    outputs: list[str] = []
    for name in ("public_tests", "private_tests", "generated_tests"):
        # {input: [texts], output: [texts]}
        held = of_type(record.get(name) or {}, dict, name)
        inputs += of_type(held.get("input") or [], list, f"{name}.input")
        outputs += of_type(held.get("output") or [], list, f"{name}.output")
    if not inputs:
        raise BadRow("no_tests")
    limit = of_type(record.get("time_limit") or {}, dict, "time_limit")
    seconds = (number_field(limit, "seconds") or 0) + (number_field(limit, "nanos") or 0) / 1e9
    return CodeTests(inputs, outputs, time_limit=seconds or None)


def _codeforces_tests(record: dict[str, Any]) -> CodeTests:
    """Read tests of open-r1/codeforces: a list of ``{input, output}``; other columns say what the tests can
    judge."""
    if record.get("interaction_format"):
        raise BadRow("interactive", "interaction_format is not empty")
    if (mode := record.get("input_mode") or "stdio") not in ("stdio", "stdin"):
        raise BadRow("file_input", f"input_mode is {mode!r:.80}, expected 'stdio'")
    # only problems whose tests are whole and judge a program by its output
    for name, reason in (("executable", "not_executable"), ("official_tests_complete", "incomplete_tests")):
        if record.get(name) is False:
            raise BadRow(reason, f"{name} is false")
    held = of_type(record.get("official_tests") or [], list, "official_tests")
    if not held:
        raise BadRow("no_tests")
    for test in held:
        of_type(test, dict, "official_tests")
    memory = number_field(record, "memory_limit")
    return CodeTests(
        [test.get("input") for test in held],
        [test.get("output") for test in held],
        time_limit=number_field(record, "time_limit"),
        memory_mb=None if memory is None else math.ceil(memory),
        checker=optional_text_field(record, "generated_checker") or None,
    )


def _codeforces_statement(record: dict[str, Any]) -> str:
    """Join statement, formats, examples and note as OpenCodeReasoning's authors do."""
    parts = [text_field(record, "description")]
    for title, name in (("Input", "input_format"), ("Output", "output_format")):
        parts += _section(title, record.get(name))
    if examples := record.get("examples"):
        parts.append("Examples")
        for example in of_type(examples, list, "examples"):
            held = of_type(example, dict, "examples")
            parts += _section("Input", held.get("input")) + _section("Output", held.get("output"))
    return "\n\n".join(parts + _section("Note", record.get("note")))


def _section(title: str, text: Any) -> list[str]:
    return [title, of_type(text, str, title)] if text else []


APPS_COLUMNS = ("question", "input_output")
QUESTION = partial(text_field, name="question")
CODEFORCES_OPTIONAL = (
    "input_format", "output_format", "interaction_format", "note", "examples", "time_limit", "memory_limit",
    "official_tests_complete", "input_mode", "generated_checker", "executable",
)  # fmt: skip
SOURCE_SETS = {
    "taco": SourceSet("taco", APPS_COLUMNS, ("starter_code",), QUESTION, _input_output_tests),
    "apps": SourceSet("apps", APPS_COLUMNS, ("starter_code",), QUESTION, _input_output_tests),
    "code_contests": SourceSet(
        "code_contests",
        ("description", "public_tests", "private_tests", "generated_tests"),
        ("time_limit", "input_file", "output_file"),
        partial(text_field, name="description"),
        _code_contests_tests,
    ),
    "open-r1/codeforces": SourceSet(
        "codeforces",
        ("description", "official_tests"),
        CODEFORCES_OPTIONAL,
        _codeforces_statement,
        _codeforces_tests,
        names_checkers=True,
    ),
}
"""Source sets by their name in OpenCodeReasoning's ``dataset`` column."""

COLUMNS = ("id", "input", "dataset", "split", "difficulty")
NO_TEXT = "-"
"""The value of ``input`` in rows of split_1, which have no text of their own."""

Wanted = dict[int | bytes, tuple[str, float | None]]
"""A record's number, or the digest of its text, -> (question id, difficulty)."""


def read(path: Path, tally: Tally) -> Iterator[Problem]:
    """Yield the distinct questions that have tests, in the source sets' order."""
    for (dataset, part), wanted in sorted(_collect(path / "questions", tally).items()):
        source = SOURCE_SETS[dataset]
        for number, record in enumerate(source.records(path / "tests", part)):
            questions = _take(wanted, number, record, source)
            if not questions:
                continue
            # questions of one record have the same text: the first stands for all
            question_id, difficulty = questions[0]
            for other_id, _ in questions[1:]:
                detail = f"{other_id}; {question_id} has the same text"
                tally.drop(f"{dataset}/{part}#{number}", "same_question", detail)
            try:
                question, checked = question_and_tests(source, record)
                yield code_row(question_id, question, checked, difficulty)
            except BadRow as bad:
                tally.drop(f"{dataset}/{part}#{number} (question {question_id})", bad.reason, bad.detail)
        for question_id, _ in wanted.values():
            tally.drop(f"{dataset}/{part} (question {question_id})", "not_in_source_set")


def _collect(path: Path, tally: Tally) -> dict[tuple[str, str], Wanted]:
    """Return the wanted records of each (dataset, split) of the source sets."""
    wanted: dict[tuple[str, str], Wanted] = defaultdict(dict)
    seen: set[str] = set()
    for file in find_files(path, "*.parquet *.jsonl"):
        records = read_records(file, COLUMNS, optional=("index",))
        for row_id, record in numbered(path, file, records):
            try:
                question_id = text_field(record, "id")
                if question_id in seen:
                    tally.drop(f"{path}: {row_id}", "same_question", question_id)
                    continue
                key, address = _address(record)
                # two ids of one record of the source set
                if address in wanted[key]:
                    detail = f"{question_id}; {wanted[key][address][0]} names the same record"
                    tally.drop(f"{path}: {row_id}", "same_question", detail)
                    continue
                wanted[key][address] = (question_id, _difficulty(record))
                seen.add(question_id)
            except BadRow as bad:
                tally.drop(f"{path}: {row_id}", bad.reason, bad.detail)
    return wanted


def _address(record: dict[str, Any]) -> tuple[tuple[str, str], int | bytes]:
    dataset, part = text_field(record, "dataset"), text_field(record, "split")
    if dataset not in SOURCE_SETS:
        raise BadRow("unknown_dataset", f"expected one of {list(SOURCE_SETS)}, found {dataset!r}")
    text = text_field(record, "input")
    if text != NO_TEXT:
        return (dataset, part), _digest(text)
    index = answer_field(record, "index")
    if not re.fullmatch(r"[0-9]{1,18}", index):
        raise BadRow("wrong_type", f"index: expected the number of a record, found {index!r:.80}")
    return (dataset, part), int(index)


def _take(
    wanted: Wanted, number: int, record: dict[str, Any], source: SourceSet
) -> list[tuple[str, float | None]]:
    """Remove the questions that name this record, by its number or by its text, from ``wanted``."""
    addresses: list[int | bytes] = [number]
    with contextlib.suppress(BadRow):  # a record without text matches no text
        addresses.append(_digest(source.statement(record)))
    return [wanted.pop(address) for address in addresses if address in wanted]


def _digest(text: str) -> bytes:
    """Return the digest of the text without white space, which the sets write differently."""
    return blake2b(re.sub(r"\s+", "", text).encode(), digest_size=16).digest()


def _difficulty(record: dict[str, Any]) -> float | None:
    """Return the difficulty as a number: Codeforces and CodeContests write numbers, TACO and APPS words."""
    text = str(record.get("difficulty"))
    return float(text) if re.fullmatch(r"[0-9]{1,18}(\.[0-9]{1,18})?", text) else None
