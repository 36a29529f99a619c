"""Headers of safetensors files: reading, with the checks of the safetensors library, and writing.

The library opens whole files and saves whole dictionaries. Here a model may be larger than memory, so only
the place of each tensor is read. Format (https://github.com/huggingface/safetensors): 8 bytes length
(little-endian), JSON {name: {dtype, shape, data_offsets}}, then the data, without gaps or overlaps.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeGuard

from megatron_eqlen.files import CheckpointError

ITEM_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "C64": 8,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1,
}  # fmt: skip
"""Bytes of one element, by the format's name of its dtype."""

LONGEST = 100_000_000
"""Maximum bytes of a header, as in the safetensors library."""


@dataclass(frozen=True)
class Entry:
    """Place of a tensor in its file."""

    file: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    """Offset in the file, in bytes."""

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]

    @property
    def stop(self) -> int:
        return self.start + self.nbytes


def read_header(file: Path) -> dict[str, Entry]:
    """Return every tensor of a safetensors file, in the order of the header. Raises CheckpointError."""
    text, size = _read_text(file)
    try:
        header = json.loads(text.decode("utf-8"), object_pairs_hook=_without_repetition)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: not a safetensors file: {error}") from None
    if not isinstance(header, dict):
        raise CheckpointError(f"{file}: not a safetensors file: expected a JSON object as header")
    header.pop("__metadata__", None)
    data = 8 + len(text)
    entries = {name: _entry(file, name, item, data) for name, item in header.items()}
    _check_extent(file, entries, data, size)
    return entries


def write_header(file: Path, entries: Mapping[str, Entry]) -> dict[str, Entry]:
    """Create ``file`` with room for the data of ``entries``, in their order; return the place of each
    tensor."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, entry in entries.items():
        stop = offset + entry.nbytes
        header[name] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": [offset, stop]}
        offset = stop
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    data = 8 + len(text)
    with open(file, "wb") as opened:
        opened.write(len(text).to_bytes(8, "little") + text)
        opened.truncate(data + offset)
    return {
        name: replace(entry, file=file.name, start=data + header[name]["data_offsets"][0])
        for name, entry in entries.items()
    }


def _read_text(file: Path) -> tuple[bytes, int]:
    """Return (the header's bytes, the file's size)."""
    try:
        with open(file, "rb") as opened:
            size = os.fstat(opened.fileno()).st_size
            length = int.from_bytes(opened.read(8), "little")
            if 8 + length > size or length > LONGEST:
                raise CheckpointError(
                    f"{file}: not a safetensors file, or truncated: its header would have {length} bytes, "
                    f"the file has {size}"
                )
            return opened.read(length), size
    except FileNotFoundError:
        raise CheckpointError(f"{file}: no such file") from None
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read: {error.strerror}") from None


def _entry(file: Path, name: str, item: Any, data: int) -> Entry:
    """Return a tensor's entry from its JSON; ``data``: position of offset 0 in the file."""
    where = f"{file}: {name!a}"
    if not isinstance(item, dict):
        raise CheckpointError(f"{where}: expected dtype, shape and data_offsets, found {item!a}")
    dtype, shape, offsets = item.get("dtype"), item.get("shape"), item.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise CheckpointError(f"{where}: dtype: expected one of {', '.join(ITEM_BYTES)}, found {dtype!a}")
    if not _are_sizes(shape):
        raise CheckpointError(f"{where}: shape: expected a list of sizes, found {shape!a}")
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CheckpointError(f"{where}: data_offsets: expected [start, stop], found {offsets!a}")
    entry = Entry(file.name, dtype, tuple(shape), data + offsets[0])
    if entry.nbytes != offsets[1] - offsets[0]:
        raise CheckpointError(
            f"{where}: shape {list(shape)} of {dtype} has {entry.nbytes} bytes, "
            f"data_offsets {offsets} have {offsets[1] - offsets[0]}"
        )
    return entry


def _are_sizes(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(size) is int and size >= 0 for size in value)


def _check_extent(file: Path, entries: dict[str, Entry], data: int, size: int) -> None:
    """Raise CheckpointError unless the tensors lie without gap or overlap and fill the file."""
    placed = sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop))
    end = placed[-1][1].stop if placed else data
    if end > size:
        raise CheckpointError(
            f"{file}: truncated: {placed[-1][0]!a} ends at byte {end}, the file has {size} bytes"
        )
    if placed and placed[0][1].start != data:
        raise CheckpointError(
            f"{file}: {placed[0][0]!a}: {placed[0][1].start - data} bytes before it belong to no tensor"
        )
    for (before, left), (name, right) in pairwise(placed):
        if right.start != left.stop:
            kind = "overlaps" if right.start < left.stop else "leaves a gap after"
            raise CheckpointError(f"{file}: {name!a} {kind} {before!a}")
    if end < size:
        raise CheckpointError(f"{file}: {size - end} bytes after the last tensor belong to no tensor")


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object. Raises ValueError if a key is not valid text or occurs twice."""
    for name, _ in pairs:
        name.encode("utf-8")
    if len(members := dict(pairs)) < len(pairs):
        names = [name for name, _ in pairs]
        repeated = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{repeated!a} comes twice in the header")
    return members
