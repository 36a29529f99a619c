"""LiveCodeBench: ``test*.jsonl`` with problem text, contest date, public tests (JSON) and private tests:
JSON, or base64 of zlib of a pickle of a JSON text, which is read without executing it; others are refused."""

from __future__ import annotations

import base64
import binascii
import pickletools
import zlib
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

from megatron_eqlen.data.files import find_files, parse_json, read_records
from megatron_eqlen.data.rows import (
    BadRow,
    Problem,
    Tally,
    code_question,
    code_row,
    field_of,
    numbered,
    of_type,
    optional_text_field,
    reading_tests,
    text_field,
)
from megatron_eqlen.graders.code.rules import MEMORY_MB
from megatron_eqlen.graders.code.tests import CodeTests

TEXT_OPCODES = ("UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8")
FRAMING_OPCODES = ("PROTO", "FRAME", "MEMOIZE", "PUT", "BINPUT", "LONG_BINPUT", "STOP")
LARGEST_UNPACKED = 1 << 29
"""Largest size of one problem's private tests, in bytes."""


def read(path: Path, tally: Tally, since: str | None = None, until: str | None = None) -> Iterator[Problem]:
    """Yield the problems with a contest date in ``since..until`` (YYYY-MM-DD, inclusive). Raises ValueError
    unless both are given: "v6" names the cumulative release (1055 problems) and its last file (175)."""
    first, last = _date(since, "since"), _date(until, "until")
    seen: set[str] = set()
    for file in find_files(path, "test*.jsonl", "*.jsonl"):
        for row_id, record in numbered(path, file, read_records(file, ())):
            try:
                with reading_tests():
                    contest = date.fromisoformat(text_field(record, "contest_date")[:10])
                if not first <= contest <= last:
                    tally.drop(f"{path}: {row_id}", "date", f"{contest} is not in {first}..{last}")
                    continue
                question_id = text_field(record, "question_id")
                if question_id in seen:
                    raise BadRow("duplicate", question_id)
                with reading_tests():
                    row = _row(question_id, record)
                yield row
                # After the row is made: a bad copy does not keep a good one out.
                seen.add(question_id)
            except BadRow as bad:
                tally.drop(f"{path}: {row_id}", bad.reason, bad.detail)


def unpack_private_tests(packed: str) -> Any:
    """Return the list of private tests. Raises ValueError if it is neither JSON nor a packed plain text."""
    if packed.lstrip().startswith("["):
        return parse_json(packed)
    try:
        unzip = zlib.decompressobj()
        data = unzip.decompress(base64.b64decode(packed, validate=True), LARGEST_UNPACKED)
    except (binascii.Error, zlib.error, ValueError) as error:
        raise BadRow("bad_tests", f"expected JSON, or base64 of zlib: {error}") from None
    # The limit ended the decompression: a small text can unpack to gigabytes.
    if unzip.unconsumed_tail:
        raise BadRow("bad_tests", f"expected at most {LARGEST_UNPACKED} bytes, found more")
    return parse_json(unpickle_text(data))


def unpickle_text(data: bytes) -> str:
    """Return the text in a pickle that holds one text and nothing else. The pickle is read, not executed: it
    cannot name a class or function, and cannot ask for memory that it does not fill."""
    texts = []
    try:
        # opcodes are listed, none is executed
        for opcode, value, _ in pickletools.genops(data):
            if opcode.name in TEXT_OPCODES:
                texts.append(value)
            elif opcode.name not in FRAMING_OPCODES:
                raise BadRow("bad_tests", f"expected a pickled text, found the pickle {opcode.name}")
    except BadRow:
        raise
    except (ValueError, OverflowError, MemoryError) as error:
        raise BadRow("bad_tests", f"expected a pickle: {error}") from None
    if len(texts) != 1:
        raise BadRow("bad_tests", f"expected one pickled text, found {len(texts)}")
    return texts[0]


def _row(question_id: str, record: dict[str, Any]) -> Problem:
    private = unpack_private_tests(text_field(record, "private_test_cases"))
    cases = of_type(parse_json(text_field(record, "public_test_cases")), list, "public_test_cases")
    cases = cases + of_type(private, list, "private_test_cases")
    # one kind a problem: stdin, or calls of a function
    kinds = {test.get("testtype") if isinstance(test, dict) else None for test in cases}
    if kinds == {"stdin"}:
        function = None
        inputs, outputs = [test.get("input") for test in cases], [test.get("output") for test in cases]
    elif kinds == {"functional"}:
        function = text_field(parse_json(text_field(record, "metadata")), "func_name")
        # an argument a line, each as JSON
        lines = [text_field(test, "input").split("\n") for test in cases]
        inputs = [[parse_json(line) for line in each if line.strip()] for each in lines]
        outputs = [parse_json(text_field(test, "output")) for test in cases]
    else:
        raise BadRow("bad_tests", f"expected stdin or functional tests, found {sorted(map(str, kinds))}")
    field_of(record, "starter_code")
    starter = optional_text_field(record, "starter_code") or ""
    question = code_question(text_field(record, "question_content"), function, starter)
    tests = CodeTests(inputs, outputs, function, memory_mb=MEMORY_MB, rules="livecodebench")
    return code_row(question_id, question, tests)


def _date(text: str | None, name: str) -> date:
    if text is None:
        raise ValueError(f"livecodebench: {name}: expected a date; give the benchmark both since and until")
    try:
        return date.fromisoformat(text)
    except ValueError:
        raise ValueError(f"livecodebench: {name}: expected YYYY-MM-DD, found {text!r}") from None
