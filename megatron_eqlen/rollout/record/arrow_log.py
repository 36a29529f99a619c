"""A file of Arrow record batches that is only ever appended to, and may be cut off anywhere.

    schema, batch, batch, ...      an IPC stream, zstd
    end, "eqlenend", CRC-32        of a file that was closed: of all bytes before

A process that is killed leaves a torn batch at the file's end; reading drops it. The checksum is looked at
before a whole file is read.
"""

from __future__ import annotations

import io
import logging
import os
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from megatron_eqlen.files import naming

VERSION = 8
"""Version of the format of recorded rollouts."""
OLD_VERSION = "2 or older (JSON lines)"

VERSION_KEY = "eqlen.version"
"""Key of the version in a schema's metadata."""

CONTINUES = b"\xff\xff\xff\xff"
"""First bytes of every message of an Arrow IPC stream."""
CLOSED = b"eqlenend"
"""Mark after the stream of a file that was closed; the CRC-32 of all bytes before follows."""

logger = logging.getLogger(__name__)


class ArrowLog:
    """A new file, ready for batches of ``schema``. After a failed write nothing may follow: the error is
    raised again."""

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self._file = _Sink(path)
        options = pa.ipc.IpcWriteOptions(compression="zstd")
        self._stream = pa.ipc.new_stream(pa.PythonFile(self._file, mode="w"), schema, options=options)
        self.write(pa.record_batch([pa.array([], field.type) for field in schema], schema=schema))

    def write(self, batch: pa.RecordBatch) -> None:
        """Append a batch; it is with the operating system then. Raises OSError."""
        self.check()
        self._stream.write_batch(batch)
        self._file.commit()

    def check(self) -> None:
        if self._file.failed is not None:
            raise self._file.failed

    def close(self) -> None:
        """Append the checksum and wait until everything is on the disk (a crash of the machine, not only of
        the process)."""
        try:
            self.check()
            self._stream.close()
            self._file.commit()
            self._file.write(CLOSED + _crc_bytes(self._file.crc))
            self._file.commit()
            os.fsync(self._file.fileno())
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Leave the file as it is: it reads as one of a process that was killed."""
        self._file.close()


class _Sink(io.RawIOBase):
    """A new file that counts its CRC-32. Collects the many small pieces of a batch in memory, until
    ``commit`` writes them."""

    def __init__(self, path: Path) -> None:
        self._file = open(path, "xb", buffering=0)  # noqa: SIM115 (closed by close)
        self._path = path
        self._pending = bytearray()
        self.crc = 0
        self.failed: OSError | None = None

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._file.fileno()

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self._pending += view
        return len(view)

    def commit(self) -> None:
        """Write what was collected. Raises OSError."""
        data, self._pending = self._pending, bytearray()
        self.crc = zlib.crc32(data, self.crc)
        rest = memoryview(data)
        try:
            with naming(self._path):
                while rest:  # a signal or a full disk may shorten a write
                    rest = rest[self._file.write(rest) :]
        except OSError as error:
            self.failed = error
            raise

    def close(self) -> None:
        self._file.close()
        super().close()


# ---- reading ---------------------------------------------------------------------------------------------


def batches(
    path: Path, schema: pa.Schema, columns: Sequence[str] | None = None, places: Iterable[int] | None = None
) -> Iterator[pa.RecordBatch]:
    """Yield the batches of ``placed`` without their places."""
    return (batch for _, batch in placed(path, schema, columns, places))


def placed(
    path: Path,
    schema: pa.Schema,
    columns: Sequence[str] | None = None,
    places: Iterable[int] | None = None,
    since: int | None = None,
) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Yield the whole batches of a file of ``schema``, each after the place where it begins.

    ``columns``: only these, reading only the bytes that they need; without it all columns, if the file's
    checksum is right. ``places``: only the batches that begin there. ``since``: only the one that begins
    there and those after it.

    A torn end is dropped, with a warning to who reads everything. Raises ValueError, naming the file, where
    it is damaged, is no such file, or is of another version of the format.
    """
    data = _mapped(path)
    if columns is None:
        _check_crc(path, data)
    source, end = pa.BufferReader(pa.py_buffer(data)), 0
    wanted = schema.names if columns is None else columns
    try:
        recorded = pa.ipc.read_schema(source)
        check_version(path, recorded)
        fields = [number for number, name in enumerate(recorded.names) if name in wanted]
        source.seek(0)
        stream = pa.ipc.open_stream(source, options=pa.ipc.IpcReadOptions(included_fields=fields))
        if since is not None:
            source.seek(since)
        for place in _each(source) if places is None else places:
            source.seek(place)
            batch = stream.read_next_batch()
            end = source.tell()
            yield place, batch
    except StopIteration:
        pass
    except (pa.ArrowException, OSError) as error:
        if _closed(data):
            raise ValueError(f"{path}: damaged: {error}") from None
    if columns is None and not _closed(data) and end < len(data):
        logger.warning("%s: dropped a torn end of %d bytes", path, len(data) - end)


def is_closed(path: Path) -> bool:
    """Return True if a file exists and was written to its end."""
    return path.exists() and _closed(_mapped(path))


def values(path: Path, schema: pa.Schema, column: str) -> set[Any]:
    """Return the distinct values of a column; no other column is decompressed."""
    return {value for batch in batches(path, schema, [column]) for value in batch[0].unique().to_pylist()}


def lists(values: Sequence[np.ndarray | None], kind: pa.DataType) -> pa.ListArray:
    """Return a column of ``pa.list_(kind)``, null for None."""
    dtype = kind.to_pandas_dtype()
    missing = [value is None for value in values]
    arrays = [np.zeros(0, dtype) if value is None else value for value in values]
    offsets = np.cumsum([0, *map(len, arrays)], dtype=np.int32)
    mask = pa.array(missing) if any(missing) else None
    items = pa.array(np.concatenate([np.zeros(0, dtype), *arrays]))
    return pa.ListArray.from_arrays(pa.array(offsets), items, mask=mask)


def pieces(column: pa.ListArray) -> list[Any]:
    """Return the arrays of a list column as views, the inverse of ``lists``."""
    items = column.values.to_numpy(zero_copy_only=True)
    ends = column.offsets.to_numpy().tolist()
    present = column.is_valid().to_pylist()
    places = zip(present, ends[:-1], ends[1:], strict=True)
    return [items[start:end] if there else None for there, start, end in places]


def _each(source: pa.BufferReader) -> Iterator[int]:
    """Yield the position of a stream of batches, time and again."""
    while True:
        yield source.tell()


def _mapped(path: Path) -> memoryview:
    """Return the file's bytes. Raises ValueError where they are no record."""
    if path.suffix == ".jsonl":
        raise other_version(path, OLD_VERSION)
    data = memoryview(pa.memory_map(str(path)).read_buffer() if path.stat().st_size else b"").cast("B")
    if data[:4] != CONTINUES[: len(data)]:
        raise ValueError(f"{path}: expected rollouts (an Arrow IPC stream), found {bytes(data[:20])!r}")
    return data


def _check_crc(path: Path, data: memoryview) -> None:
    if _closed(data) and data[-4:] != _crc_bytes(zlib.crc32(data[: -len(CLOSED) - 4])):
        raise ValueError(f"{path}: damaged: expected the checksum that its end holds, found another")


def _closed(data: memoryview) -> bool:
    """Return True if the file was written to its end."""
    return data[-len(CLOSED) - 4 : -4] == CLOSED


def _crc_bytes(crc: int) -> bytes:
    return crc.to_bytes(4, "little")


def check_version(path: Path, schema: pa.Schema) -> None:
    found = (schema.metadata or {}).get(VERSION_KEY.encode(), b"none").decode()
    if found != str(VERSION):
        raise other_version(path, found)


def other_version(path: Path, found: str) -> ValueError:
    return ValueError(
        f"{path}: expected recorded rollouts of format version {VERSION}, found version {found}: "
        f"read it with the release that wrote it, or remove it and the step is generated again"
    )
