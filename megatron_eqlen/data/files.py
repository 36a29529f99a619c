"""Reads the records of a file. A damaged file, or one of another kind, is a ValueError that names file and
row, what was expected and what was found; a readable record that cannot be used is counted by its reader."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pyarrow as pa
import pyarrow.parquet as pq

from megatron_eqlen.files import is_lfs_pointer
from megatron_eqlen.hf.dataset_files import NOT_DATA

BATCH_ROWS = 256
MAGIC = {
    b"\x1f\x8b": "a gzip file: unpack it",
    b"\x28\xb5\x2f\xfd": "a zstd file: unpack it",
    b"\xfd7zXZ": "an xz file: unpack it",
    b"BZh": "a bzip2 file: unpack it",
    b"PK\x03\x04": "a zip file: unpack it",
    b"PAR1": "a parquet file: name it .parquet",
    b"\xff\xfe": "UTF-16: convert it to UTF-8",
    b"\xfe\xff": "UTF-16: convert it to UTF-8",
}
"""First bytes of kinds of files that are often taken for JSON."""
CONVERTED = {
    ".csv": "Dataset.from_csv('FILE')",
    ".tsv": "Dataset.from_csv('FILE', sep='\\t')",
    ".xlsx": "Dataset.from_pandas(pandas.read_excel('FILE'))",
    ".arrow": "load_from_disk('FOLDER')",
}
"""How to read files of other kinds, to write them as parquet."""
UNREAD = (*CONVERTED, ".ndjson", ".gz", ".zst", ".xz", ".bz2", ".zip")
"""Endings of data files that no reader reads."""
UTF8_MARK = b"\xef\xbb\xbf"


def find_files(path: Path, *patterns: str) -> list[Path]:
    """Return ``path`` if it is a file, else the files below of the first pattern that has any, sorted."""
    if path.is_file():
        # a named file need not match a pattern, but parquet is no text
        kinds = {Path(each).suffix for pattern in patterns for each in pattern.split()}
        if path.suffix == ".parquet" and ".parquet" not in kinds:
            expected = " or ".join(sorted(kinds))
            raise ValueError(f"{path}: expected {expected}, found a parquet file: name another reader")
        _refuse_kind(path)
        return [path]
    if not path.is_dir():
        raise ValueError(f"{path}: no such file or folder")
    found = sorted(file for file in path.rglob("*") if file.is_file() and file.name not in NOT_DATA)
    files = [each for each in found if not any(p.startswith(".") for p in each.relative_to(path).parts)]
    # the first pattern that has files wins, so that kinds are not mixed
    for pattern in patterns:
        if matching := [file for file in files if any(map(file.match, pattern.split()))]:
            return matching
    for file in files:
        _refuse_kind(file)
    names = ", ".join(file.relative_to(path).as_posix() for file in files[:5])
    expected = " or ".join(" ".join(patterns).split())
    raise ValueError(f"{path}: expected files named {expected}, found {names or 'none'}")


def _refuse_kind(file: Path) -> None:
    if file.suffix in CONVERTED:
        remedy = f"with the package datasets, {CONVERTED[file.suffix]}.to_parquet('train.parquet')"
        raise ValueError(f"{file}: expected .jsonl, .parquet or .json, found {file.suffix}: {remedy}")


def read_records(
    file: Path, columns: Iterable[str], optional: Iterable[str] | None = ()
) -> Iterator[dict[str, Any]]:
    """Yield the records of a parquet, JSON Lines or JSON-list file, streamed. A parquet file lacking one of
    ``columns`` raises ValueError; in JSON a record may lack any. ``optional``: further columns, None: all."""
    if not file.is_file():
        raise ValueError(f"{file}: expected a file, found {'a folder' if file.is_dir() else 'none'}")
    if file.stat().st_size == 0:
        raise ValueError(f"{file}: expected records, found an empty file")
    if is_lfs_pointer(file):
        raise ValueError(f"{file}: expected records, found a pointer of Git LFS: run git lfs pull there")
    # Every other ending is taken for JSON Lines.
    if file.suffix == ".parquet":
        yield from _read_parquet(file, list(columns), None if optional is None else list(optional))
    elif file.suffix == ".json":
        yield from _read_json_list(file)
    else:
        yield from _read_json_lines(file)


def parse_json(text: str | bytes) -> Any:
    """Return the value of a JSON text. Raises ValueError for other text, for a key that stands twice, and for
    what no tokenizer or program can hold: NaN, very long integers, endless nesting, half a surrogate pair."""
    if isinstance(text, bytes):
        try:
            text = text.decode("utf-8")
        except UnicodeDecodeError as error:
            byte = f"byte 0x{text[error.start]:02x} at {error.start}"
            raise ValueError(f"expected UTF-8, found {byte}") from None
    try:
        value = json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_record)
    except json.JSONDecodeError as error:
        at = f"line {error.lineno}, column {error.colno}" if error.lineno > 1 else f"column {error.colno}"
        raise ValueError(f"not JSON: {error.msg} at {at} of {error.doc.strip()[:60]!r}") from None
    except RecursionError:
        raise ValueError("expected JSON of some hundred levels at most, found deeper nesting") from None
    # the escapes alone can hold half a pair: looking is cheaper than walking
    if "\\ud" in text or "\\uD" in text:
        refuse_half_pairs(value)
    return value


def _record(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    # Python would keep the last of two values without a word.
    record = dict(pairs)
    if len(record) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"expected each key once, found {twice!r} more than once")
    return record


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"expected a number, found {name}, which JSON has not")


def refuse_half_pairs(value: Any) -> None:
    """Raise ValueError if a text of ``value``, plain data, holds half a surrogate pair."""
    # UTF-8 has no half pairs: encoding fails at one, in keys, too.
    try:
        json.dumps(value, ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError as error:
        half = error.object[error.start]
        raise ValueError(f"expected text, found half a surrogate pair, \\u{ord(half):04x}") from None


def _read_json_lines(file: Path) -> Iterator[Any]:
    with file.open("rb") as lines:
        _check_start(file, lines.read(8))
        lines.seek(0)
        for number, line in enumerate(lines, 1):
            line = line.removeprefix(UTF8_MARK) if number == 1 else line
            if line.strip():
                try:
                    yield parse_json(line.strip())
                except ValueError as error:
                    raise ValueError(f"{file}: line {number}: {error}") from None


def _read_json_list(file: Path) -> Iterable[Any]:
    """Return the records of a list, or of JSON Lines under the name of a list."""
    data = file.read_bytes()
    _check_start(file, data[:8])
    try:
        records = parse_json(data.removeprefix(UTF8_MARK))
    except ValueError as error:
        if str(error).startswith("not JSON: Extra data at line "):
            return _read_json_lines(file)
        raise ValueError(f"{file}: {error}") from None
    if not isinstance(records, list):
        found = f"a record of {', '.join(records)}" if isinstance(records, dict) else type(records).__name__
        raise ValueError(f"{file}: expected a list of records, found {found}")
    return records


def _check_start(file: Path, start: bytes) -> None:
    for magic, kind in MAGIC.items():
        if start.startswith(magic):
            raise ValueError(f"{file}: expected JSON in UTF-8, found {kind}")


def _read_parquet(file: Path, columns: list[str], optional: list[str] | None) -> Iterator[dict[str, Any]]:
    row = 0
    try:
        with pq.ParquetFile(file, page_checksum_verification=True) as parquet:
            present = parquet.schema_arrow.names
            if missing := [name for name in columns if name not in present]:
                raise ValueError(f"{file}: expected columns {columns}, missing {missing}; found {present}")
            some = columns + [name for name in optional or () if name in present]
            wanted = present if optional is None else some
            if twice := sorted({name for name in wanted if present.count(name) > 1}):
                raise ValueError(f"{file}: expected each column once, found {twice} more than once")
            for batch in parquet.iter_batches(batch_size=BATCH_ROWS, columns=wanted):
                batch.validate(full=True)  # texts in UTF-8
                has_bytes = optional is not None and "binary" in str(batch.schema)
                for record in batch.to_pylist():
                    yield _decoded(record, f"{file}: row {row}") if has_bytes else record
                    row += 1
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{file}: row {row} or after: expected parquet data, found: {error}") from None


def _decoded(value: Any, where: str) -> Any:
    """Return plain data with bytes as the texts that some writers keep so. Raises ValueError for others."""
    if isinstance(value, dict):
        return {name: _decoded(each, f"{where}: {name}") for name, each in value.items()}
    if isinstance(value, list):
        return [_decoded(each, where) for each in value]
    try:
        return value.decode() if isinstance(value, bytes) else value
    except UnicodeDecodeError:
        raise ValueError(f"{where}: expected text in UTF-8, found the bytes {value[:20]!r}") from None
