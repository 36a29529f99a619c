"""What every reader yields, and the count of what it left out.

A reader is a generator ``read(path, tally, ...)`` of one data set's files: it streams, checks every
field, and leaves out a bad row with its file, number and reason. A file without a needed column is an
error.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

log = logging.getLogger(__name__)

BATCH_ROWS = 256


@dataclass(frozen=True)
class Row:
    """One question before it is formatted."""

    row_id: str
    """File and number, for example ``train-00000.parquet#17``; unique in its source."""
    question: str
    gold: str
    """What the grader compares with, as in ``Prompt.gold``."""
    grader: str = "math"
    difficulty: float | None = None
    """The data set's own scale."""
    instruction: str | None = None
    """Replaces the recipe's; None: the recipe's."""
    gold_checked: bool = False
    """The gold is known to parse and to equal itself."""


@dataclass
class Tally:
    """Rows kept, and rows left out by reason; the first of each reason is logged."""

    kept: int = 0
    dropped: Counter[str] = field(default_factory=Counter)

    def drop(self, where: str, reason: str, detail: str = "") -> None:
        if not self.dropped[reason]:
            log.warning("%s: left out: %s%s", where, reason, f" ({detail})" if detail else "")
        self.dropped[reason] += 1

    def report(self) -> dict[str, int]:
        return {"kept": self.kept} | {
            f"dropped/{reason}": count for reason, count in sorted(self.dropped.items())
        }


class BadRow(ValueError):
    """A row that cannot be used: ``reason`` is what is counted, ``detail`` what was found."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason} ({detail})" if detail else reason)
        self.reason = reason
        self.detail = detail


def find_files(path: Path, *patterns: str) -> list[Path]:
    """``path`` itself if it is a file, else the files below it of the first pattern that has any, sorted."""
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise ValueError(f"{path}: no such file or folder")
    for pattern in patterns:
        if files := sorted(file for file in path.rglob(pattern) if file.is_file()):
            return files
    raise ValueError(f"{path}: expected files named {' or '.join(patterns)}, found none")


def read_records(
    file: Path, columns: Iterable[str], optional: Iterable[str] = ()
) -> Iterator[dict[str, Any]]:
    """The records of a parquet, JSON Lines or JSON-list file, streamed.

    A parquet file lacking one of ``columns`` raises ValueError; in JSON a record may lack any of them.
    """
    if file.suffix == ".parquet":
        yield from _read_parquet(file, list(columns), list(optional))
    elif file.suffix == ".json":
        yield from _checked_list(file)
    else:
        yield from _read_json_lines(file)


def _read_parquet(file: Path, columns: list[str], optional: list[str]) -> Iterator[dict[str, Any]]:
    try:
        parquet = pq.ParquetFile(file)
    except pa.ArrowInvalid as error:
        raise ValueError(f"{file}: not a parquet file: {error}") from None
    with parquet:
        present = parquet.schema_arrow.names
        if missing := [name for name in columns if name not in present]:
            raise ValueError(f"{file}: expected columns {columns}, missing {missing}; found {present}")
        wanted = columns + [name for name in optional if name in present]
        for batch in parquet.iter_batches(batch_size=BATCH_ROWS, columns=wanted):
            yield from batch.to_pylist()


def _read_json_lines(file: Path) -> Iterator[Any]:
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines):
            if line.strip():
                try:
                    yield json.loads(line)
                except json.JSONDecodeError as error:
                    raise ValueError(f"{file}: line {number + 1}: not JSON: {error}") from None


def _checked_list(file: Path) -> list[Any]:
    try:
        records = json.loads(file.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{file}: not JSON: {error}") from None
    if not isinstance(records, list):
        raise ValueError(f"{file}: expected a list of records, found {type(records).__name__}")
    return records


def numbered(path: Path, file: Path, records: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    """(row id, record) for each record of ``file``, named relative to the source's ``path``."""
    name = file.relative_to(path).as_posix() if file != path else file.name
    for number, record in enumerate(records):
        yield f"{name}#{number}", record


def text_field(record: Any, name: str) -> str:
    """The non-empty text in ``record[name]``. Raises BadRow."""
    value = field_of(record, name)
    if not isinstance(value, str):
        raise BadRow("wrong_type", f"{name}: expected text, found {type(value).__name__}")
    if not value.strip():
        raise BadRow("empty_field", name)
    return value


def answer_field(record: Any, name: str) -> str:
    """The answer in ``record[name]`` as text; files in the wild write integers too. Raises BadRow."""
    value = field_of(record, name)
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else text_field(record, name)


def number_field(record: Any, name: str) -> float | None:
    """The number in ``record[name]``, None where there is none. Raises BadRow."""
    value = record.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BadRow("wrong_type", f"{name}: expected a number, found {type(value).__name__}")
    return float(value)


def field_of(record: Any, name: str) -> Any:
    if not isinstance(record, dict):
        raise BadRow("wrong_type", f"expected a record, found {type(record).__name__}")
    if name not in record:
        raise BadRow("missing_column", f"{name}; found {sorted(record)}")
    return record[name]
