"""LiveCodeBench: ``test*.jsonl`` with problem text, contest date, public tests (JSON) and packed private
tests.

Private tests are JSON, or base64 of zlib of a pickle of a JSON text. The pickle is read by an unpickler
that knows no class and no function: anything but plain data is refused.
"""

from __future__ import annotations

import base64
import binascii
import io
import json
import pickle
import zlib
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any, NoReturn

from megatron_eqlen.data.code_prompts import code_question
from megatron_eqlen.data.code_rows import code_row, reading_tests
from megatron_eqlen.data.rows import (
    BadRow,
    Row,
    Tally,
    field_of,
    find_files,
    numbered,
    read_records,
    text_field,
)
from megatron_eqlen.rewards.code_tests import CodeTests
from megatron_eqlen.rewards.livecodebench import MEMORY_MB

LARGEST_UNPACKED = 1 << 30
"""Bytes of one problem's private tests."""


def read(path: Path, tally: Tally, since: str | None = None, until: str | None = None) -> Iterator[Row]:
    """The problems whose contest date lies in ``since..until`` (YYYY-MM-DD, both inclusive).

    Raises ValueError without both: "v6" names the cumulative release (1055 problems) and its last file
    (175).
    """
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
                seen.add(question_id)
            except BadRow as bad:
                tally.drop(f"{path}: {row_id}", bad.reason, bad.detail)


def unpack_private_tests(packed: str) -> Any:
    """The list of private tests. Raises BadRow if it is neither JSON nor a packed plain text."""
    try:
        return json.loads(packed)
    except json.JSONDecodeError:
        pass
    try:
        unzip = zlib.decompressobj()
        data = unzip.decompress(base64.b64decode(packed, validate=True), LARGEST_UNPACKED)
        if unzip.unconsumed_tail:
            raise BadRow("bad_private_tests", f"more than {LARGEST_UNPACKED} bytes")
        text = _PlainUnpickler(io.BytesIO(data)).load()
        return json.loads(text)
    except (binascii.Error, zlib.error, pickle.UnpicklingError, EOFError, TypeError, ValueError) as error:
        if isinstance(error, BadRow):
            raise
        raise BadRow("bad_private_tests", str(error)) from None


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"the pickle is not plain data: it asks for {module}.{name}")

    def persistent_load(self, pid: Any) -> NoReturn:
        raise pickle.UnpicklingError("the pickle is not plain data: it asks for a persistent object")


def _row(question_id: str, record: dict[str, Any]) -> Row:
    found = _list(json.loads(text_field(record, "public_test_cases")), "public_test_cases")
    found += _list(unpack_private_tests(text_field(record, "private_test_cases")), "private_test_cases")
    kinds = {test.get("testtype") if isinstance(test, dict) else None for test in found}
    if kinds == {"stdin"}:
        function = None
        inputs, outputs = [test.get("input") for test in found], [test.get("output") for test in found]
    elif kinds == {"functional"}:
        function = text_field(json.loads(text_field(record, "metadata")), "func_name")
        inputs = [_arguments(text_field(test, "input")) for test in found]
        outputs = [json.loads(text_field(test, "output")) for test in found]
    else:
        raise BadRow("bad_tests", f"expected stdin or functional tests, found {sorted(map(str, kinds))}")
    starter = field_of(record, "starter_code") or ""
    question = code_question(text_field(record, "question_content"), function, starter)
    tests = CodeTests(inputs, outputs, function, memory_mb=MEMORY_MB, livecodebench=True)
    return code_row(question_id, question, tests)


def _arguments(text: str) -> list[Any]:
    return [json.loads(line) for line in text.split("\n") if line.strip()]


def _list(tests: Any, name: str) -> list[Any]:
    if not isinstance(tests, list):
        raise BadRow("bad_tests", f"{name}: expected a list, found {type(tests).__name__}")
    return tests


def _date(text: str | None, name: str) -> date:
    if text is None:
        raise ValueError(f"livecodebench: {name}: expected a date; give the benchmark both since and until")
    try:
        return date.fromisoformat(text)
    except ValueError:
        raise ValueError(f"livecodebench: {name}: expected YYYY-MM-DD, found {text!r}") from None
