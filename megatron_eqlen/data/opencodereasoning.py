"""OpenCodeReasoning: questions from split_0 and split_1, tests from the sets they were taken from.

735,255 rows hold 28,319 distinct questions and no tests. One pass over the files collects the distinct
questions (by ``id``); one pass over each source set yields the collected questions that have tests: a split_1
row names its record by ``index``, a split_0 row repeats its text. Both passes stream. A problem without
tests, or one that needs a special checker, is counted and left out: it must never be rewarded.
"""

from __future__ import annotations

import contextlib
import re
from collections import defaultdict
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any

from megatron_eqlen.data.code_sources import SOURCE_SETS, SourceSet, question_and_tests
from megatron_eqlen.data.files import find_files, read_records
from megatron_eqlen.data.rows import BadRow, Problem, Tally, answer_field, code_row, numbered, text_field

COLUMNS = ("id", "input", "dataset", "split", "difficulty")
NO_TEXT = "-"
"""The value of ``input`` in rows of split_1, which have no text of their own."""

Wanted = dict[int | bytes, tuple[str, float | None]]
"""A record's number, or the digest of its text, -> (question id, difficulty)."""


def read(path: Path, tally: Tally, split: str | None = None, tests: str | None = None) -> Iterator[Problem]:
    """Yield the distinct questions that have tests, in the source sets' order."""
    if tests is None:
        raise ValueError(
            "opencodereasoning: tests: expected the folder of TACO, APPS, CodeContests, Codeforces"
        )
    for (dataset, part), wanted in sorted(_collect(path, tally, split).items()):
        source = SOURCE_SETS[dataset]
        for number, record in enumerate(source.records(Path(tests), part)):
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


def _collect(path: Path, tally: Tally, split: str | None) -> dict[tuple[str, str], Wanted]:
    """Return the wanted records of each (dataset, split) of the source sets."""
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
