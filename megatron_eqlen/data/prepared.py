"""A prepared source: one parquet file of checked rows and their manifest, with random access."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from megatron_eqlen.data.rows import Problem
from megatron_eqlen.files import replaced
from megatron_eqlen.graders.code.tests import VERSION as CODE_TESTS_VERSION

SCHEMA = pa.schema(
    [
        pa.field("row_id", pa.string(), nullable=False),
        pa.field("question", pa.string(), nullable=False),
        pa.field("gold", pa.string(), nullable=False),
        pa.field("grader", pa.string(), nullable=False),
        pa.field("difficulty", pa.float64()),
        pa.field("instruction", pa.string()),
        pa.field("gold_checked", pa.bool_(), nullable=False),
        pa.field("messages", pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))),
    ]
)
"""Columns: the fields of a Problem."""
ROWS_PER_GROUP = 64
"""Most rows in a row group: one random access decodes a whole group."""
CHARACTERS_PER_GROUP = 4 << 20
"""Characters of golds after which a row group ends: some problems have megabytes of tests."""
GROUPS_KEPT = 8
MANIFEST = b"eqlen"
"""Key of the manifest in the file's metadata."""

assert SCHEMA.names == [field.name for field in fields(Problem)]


class PreparedRows(Sequence[Problem]):
    """The rows of a prepared file, or those with some ``numbers``; a few row groups are in memory at a time.
    Raises ValueError for other files, and other versions', whose rules may differ."""

    def __init__(self, path: Path, numbers: Sequence[int] | None = None) -> None:
        if not path.is_file():
            raise ValueError(f"{path}: expected a file of tools/prepare_data.py, found none")
        self._path = path
        with self._reading():
            self._file = pq.ParquetFile(path, page_checksum_verification=True)
        metadata = self._file.metadata
        self.manifest: dict[str, Any] = json.loads((metadata.metadata or {}).get(MANIFEST, b"{}"))
        if (found := self.manifest.get("version")) != CODE_TESTS_VERSION:
            expected = f"expected a file of tools/prepare_data.py, version {CODE_TESTS_VERSION}"
            raise ValueError(f"{path}: {expected}, found version {found}: prepare it again")
        sizes = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
        # [row groups + 1] number of each group's first row
        self._starts = np.cumsum([0, *sizes])
        self._numbers = range(metadata.num_rows) if numbers is None else numbers
        self._group = lru_cache(GROUPS_KEPT)(self._read_group)

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, at: int) -> Problem:
        number = self._numbers[at]
        # The last group that starts at or before the row.
        group = int(np.searchsorted(self._starts, number, side="right")) - 1
        return _problem(self._group(group)[number - int(self._starts[group])])

    def without_golds(self) -> Iterator[Problem]:
        """Yield the rows in the file's order without their golds, which are most of the bytes."""
        columns = [name for name in self._file.schema_arrow.names if name != "gold"]
        chosen, number = set(self._numbers), 0
        with self._reading():
            for batch in self._file.iter_batches(4096, columns=columns):
                for row in batch.to_pylist():
                    if number in chosen:
                        yield _problem(row | {"gold": ""})
                    number += 1

    def row_ids(self) -> list[str]:
        """Return the ids of all rows of the file."""
        with self._reading():
            return self._file.read(columns=["row_id"]).column(0).to_pylist()

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Raise ValueError for a damaged page: pages are checked as they are read."""
        try:
            yield
        except (pa.ArrowException, OSError) as error:
            raise ValueError(f"{self._path}: damaged: {error}: prepare it again") from None

    def _read_group(self, group: int) -> list[dict[str, Any]]:
        with self._reading():
            return self._file.read_row_group(group).to_pylist()


def _problem(row: dict[str, Any]) -> Problem:
    messages = row.get("messages")
    values: dict[str, Any] = row | {"messages": tuple(messages) if messages else None}
    return Problem(**values)


@contextmanager
def prepared_file(path: Path, manifest: Mapping[str, Any]) -> Iterator[Callable[[Problem], None]]:
    """Yield a function to write rows; at the end the file appears, with ``manifest`` as it is then."""
    rows: list[dict[str, Any]] = []
    characters = 0
    options: dict[str, Any] = {"compression": "zstd", "write_statistics": False, "write_page_checksum": True}
    with replaced(path) as partial, pq.ParquetWriter(partial, SCHEMA, **options) as writer:

        def write(row: Problem) -> None:
            nonlocal characters
            if more := {key for turn in row.messages or () for key in turn} - {"role", "content"}:
                raise ValueError(f"{row.row_id}: a prepared file keeps no {', '.join(sorted(more))} of turns")
            rows.append(asdict(row))
            characters += len(row.gold)
            if len(rows) == ROWS_PER_GROUP or characters >= CHARACTERS_PER_GROUP:
                end_group()

        def end_group() -> None:
            nonlocal characters
            writer.write_table(pa.Table.from_pylist(rows, schema=SCHEMA))
            rows.clear()
            characters = 0

        yield write
        if rows:
            end_group()
        # the manifest goes into the footer, when it is complete
        held = {"version": CODE_TESTS_VERSION} | dict(manifest)
        writer.add_key_value_metadata({MANIFEST: json.dumps(held).encode()})
