"""OpenCodeReasoning: questions from split_0 and split_1, tests from the sets they were taken from.

735,255 rows hold 28,319 distinct questions and no tests. One pass over its files collects the distinct
questions (by ``id``), one pass over each source set yields those of them that have tests: a split_1 row
names its record by ``index``, a split_0 row repeats its text. Both passes stream. What has no tests, or
needs a special checker, is counted and left out: a problem without tests must never be rewarded.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any

from megatron_eqlen.data.code_rows import code_row
from megatron_eqlen.data.code_sources import SOURCE_SETS, SourceSet, question_and_tests
from megatron_eqlen.data.files import find_files, read_records
from megatron_eqlen.data.rows import BadRow, Problem, Tally, field_of, numbered, text_field

COLUMNS = ("id", "input", "dataset", "split", "difficulty")
NO_TEXT = "-"
"""The value of ``input`` in rows of split_1, which have no text of their own."""

Wanted = dict[int | bytes, tuple[str, float | None]]
"""From a record's number, or the digest of its text, to (question id, difficulty)."""


def read(path: Path, tally: Tally, split: str | None = None, tests: str | None = None) -> Iterator[Problem]:
    """The distinct questions that have tests, in the source sets' order."""
    if tests is None:
        raise ValueError(
            "opencodereasoning: tests: expected the folder of TACO, APPS, CodeContests, Codeforces"
        )
    for (dataset, part), wanted in sorted(_collect(path, tally, split).items()):
        source = SOURCE_SETS[dataset]
        for number, record in enumerate(source.records(Path(tests), part)):
            found = _take(wanted, number, record, source)
            if found is None:
                continue
            question_id, difficulty = found
            try:
                question, checked = question_and_tests(source, record)
                yield code_row(question_id, question, checked, difficulty)
            except BadRow as bad:
                tally.drop(f"{dataset}/{part}#{number} (question {question_id})", bad.reason, bad.detail)
        for question_id, _ in wanted.values():
            tally.drop(f"{dataset}/{part} (question {question_id})", "not_in_source_set")


def _collect(path: Path, tally: Tally, split: str | None) -> dict[tuple[str, str], Wanted]:
    """The wanted records of each (dataset, split) of the source sets."""
    wanted: dict[tuple[str, str], Wanted] = defaultdict(dict)
    seen: set[str] = set()
    patterns = (f"{split}*.parquet", f"{split}/*.parquet") if split else ("*.parquet",)
    for file in find_files(path, *patterns):
        records = read_records(file, COLUMNS, optional=("index",))
        for row_id, record in numbered(path, file, records):
            try:
                question_id = text_field(record, "id")
                if question_id in seen:
                    tally.drop(f"{path}: {row_id}", "same_question", question_id)
                    continue
                key, address = _address(record)
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
    index = str(field_of(record, "index"))
    if not index.isdigit():
        raise BadRow("wrong_type", f"index: expected a number, found {index!r}")
    return (dataset, part), int(index)


def _take(
    wanted: Wanted, number: int, record: dict[str, Any], source: SourceSet
) -> tuple[str, float | None] | None:
    if number in wanted:
        return wanted.pop(number)
    try:
        return wanted.pop(_digest(source.statement(record)), None)
    except BadRow:
        return None  # a record without text matches no question


def _digest(text: str) -> bytes:
    """Digest of the text without white space: the sets write white space differently."""
    return blake2b(re.sub(r"\s+", "", text).encode(), digest_size=16).digest()


def _difficulty(record: dict[str, Any]) -> float | None:
    """Codeforces and CodeContests write numbers, TACO and APPS words."""
    text = str(record["difficulty"])
    return float(text) if re.fullmatch(r"\d+(\.\d+)?", text) else None
