"""A file of Arrow record batches that is only ever appended to, and may be cut off anywhere.

    schema, batch, batch, ...      an IPC stream, zstd; each batch with a checksum of its values
    end, "eqlenend"                of a file that was closed

A process that is killed leaves a torn batch at the file's end; reading drops it.
"""

from __future__ import annotations

import io
import logging
import mmap
import os
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from megatron_eqlen.files import naming, opened

VERSION = 11
"""Version of the format of recorded rollouts."""
VERSION_KEY = b"eqlen.version"
"""Key of the version in a schema's metadata."""
CRC_KEY = b"eqlen.crc32"
"""Key of a batch's checksum in its metadata."""
START = b"\xff\xff\xff\xff"
"""First bytes of an Arrow IPC stream."""
CLOSED = b"eqlenend"
"""Last bytes of a file that was closed."""

logger = logging.getLogger(__name__)


class ArrowLog:
    """A new file, ready for batches of ``schema``. Nothing may follow a failed write but ``abandon``."""

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self._path = path
        self._file = io.BufferedWriter(io.FileIO(path, "x"), 1 << 20)
        options = pa.ipc.IpcWriteOptions(compression="zstd")
        self._stream = pa.ipc.new_stream(self._file, schema, options=options)
        # Arrow writes the schema with the first batch: an empty one makes the file readable at once
        self.write(pa.record_batch([pa.array([], field.type) for field in schema], schema=schema))

    def write(self, batch: pa.RecordBatch) -> None:
        """Append a batch, with its metadata; it is with the operating system then. Raises OSError."""
        with naming(self._path):
            metadata = {**(batch.schema.metadata or {}), CRC_KEY: _crc(batch)}
            self._stream.write_batch(batch, custom_metadata=metadata)
            self._file.flush()

    def close(self) -> None:
        """End the file and wait until it is on the disk, safe from a crash of the machine."""
        try:
            with naming(self._path):
                self._stream.close()
                self._file.write(CLOSED)
                self._file.flush()
                os.fsync(self._file.fileno())
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Leave the file as it is: it reads as one of a process that was killed."""
        self._file.raw.close()  # what a failed write left in the buffer is not written again


# ---- reading ---------------------------------------------------------------------------------------------


def batches(path: Path, schema: pa.Schema, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
    """Yield the whole batches of a file of ``schema``. ``columns``: only these; no other is decompressed, and
    checksums, of whole batches, are not verified. A torn end is dropped, with a warning to who reads all.
    Raises ValueError for a file that is damaged, not such a file, or of another version."""
    with opened(path) as file:  # whose errors name it, other than Arrow's
        size = file.seek(0, os.SEEK_END)
        data = pa.py_buffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else b"")
    # a killed writer may have left less than a start
    if data[: len(START)].to_pybytes() != START[: data.size]:
        raise ValueError(f"{path}: expected rollouts (an Arrow IPC stream), found {data[:20].to_pybytes()!r}")
    closed = data[-len(CLOSED) :].to_pybytes() == CLOSED
    source, read = pa.BufferReader(data), 0
    wanted = schema.names if columns is None else columns
    try:
        # the schema first: it tells a file of another release from a damaged one
        recorded = pa.ipc.read_schema(source)
        _check_version(path, recorded, schema)
        source.seek(0)
        fields = [number for number, name in enumerate(recorded.names) if name in wanted]
        stream = pa.ipc.open_stream(source, options=pa.ipc.IpcReadOptions(included_fields=fields))
        while (batch := _next(stream, verify=columns is None)) is not None:
            read = source.tell()
            yield batch
        if closed and source.tell() != data.size - len(CLOSED):
            raise pa.ArrowInvalid("expected no more bytes after the stream's end")
    # without the closing bytes the writer was killed, and all behind the last whole batch is torn
    except (pa.ArrowException, OSError) as error:
        if closed:
            raise ValueError(f"{path}: damaged: {error}") from None
    if columns is None and not closed and read < data.size:
        logger.warning("%s: dropped a torn end of %d bytes", path, data.size - read)


def is_closed(path: Path) -> bool:
    """Return True if the file was closed: its writer was not killed, and writes no more."""
    with opened(path) as file:
        size = file.seek(0, 2)
        file.seek(max(size - len(CLOSED), 0))
        return file.read() == CLOSED


def _next(stream: pa.RecordBatchReader, verify: bool) -> pa.RecordBatch | None:
    """Return the next batch, None at the end. Raises ArrowInvalid for a damaged one."""
    try:
        batch, metadata = stream.read_next_batch_with_custom_metadata()
    except StopIteration:
        return None
    batch.validate(full=True)
    if verify and (metadata is None or metadata.get(CRC_KEY) != _crc(batch)):
        raise pa.ArrowInvalid("expected a batch with the checksum that it holds, found another")
    return batch.replace_schema_metadata(metadata)


def _crc(batch: pa.RecordBatch) -> bytes:
    """Return the CRC-32 of a batch's values, in decimal digits."""
    return str(zlib.crc32(batch.serialize())).encode()


def _check_version(path: Path, recorded: pa.Schema, schema: pa.Schema) -> None:
    version = (recorded.metadata or {}).get(VERSION_KEY, b"none").decode(errors="replace")
    if version != str(VERSION) or recorded != schema:
        columns = sorted({*map(str, schema)} ^ {*map(str, recorded)})
        expected = f"expected recorded rollouts of format version {VERSION}, found version {version}"
        other = f"of another release: {len(columns)} columns differ ({', '.join(columns)[:80]})"
        ways = "read it with the release that wrote it, or remove it and the step is generated again"
        raise ValueError(f"{path}: {expected}, {other}: {ways}")


def values(path: Path, schema: pa.Schema, column: str) -> set[Any]:
    """Return the distinct values of a column; no other column is decompressed."""
    return {value for batch in batches(path, schema, [column]) for value in batch[0].unique().to_pylist()}
