"""Hugging Face folders on disk: read any part of any tensor, write tensors in any order.

The safetensors library opens files whole and saves dictionaries whole. Here a model may be larger than
memory: tensors are mapped one at a time and written one at a time into files whose layout is known before.
Format: 8 bytes length (little-endian), JSON header {name: {dtype, shape, data_offsets}}, data.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}

FUSED_EXPERTS = re.compile(r"(.*\.mlp\.experts)\.(gate_up_proj|down_proj)")


class CheckpointError(ValueError):
    """A folder of weights that cannot be read or written; the message names the file and the tensor."""


@dataclass(frozen=True)
class Entry:
    """Where a tensor lies."""

    file: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    """Byte in the file."""

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


class HFFolder:
    """The tensors of a folder with ``model.safetensors`` or an index and its shards.

    Experts that are fused on disk (``experts.gate_up_proj [experts, 2 x width, hidden]``) appear one by
    one, as in the checkpoints that Qwen publishes. Raises CheckpointError for missing and broken files.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not self.path.is_dir():
            raise CheckpointError(f"{self.path}: no such folder")
        self.index = _read_index(self.path)
        files = sorted(set(self.index["weight_map"].values())) if self.index else [SINGLE]
        stored = {name: entry for file in files for name, entry in _read_header(self.path / file).items()}
        if self.index:
            _check_index(self.path, self.index, stored)
        self.entries = dict(single for name, entry in stored.items() for single in _unfused(name, entry))

    def tensor(self, name: str) -> Tensor:
        """The tensor, mapped from disk: pages are read when they are used, and dropped with the tensor."""
        entry = self.entries[name]
        if entry.nbytes == 0:
            return torch.empty(entry.shape, dtype=DTYPES[entry.dtype])
        mapped = np.memmap(
            self.path / entry.file, np.uint8, mode="c", offset=entry.start, shape=(entry.nbytes,)
        )
        return torch.frombuffer(mapped, dtype=DTYPES[entry.dtype]).view(entry.shape)

    def other_files(self) -> Iterable[Path]:
        """Everything beside the weights: configuration, tokenizer, generation settings, chat template."""
        for file in sorted(self.path.iterdir()):
            weights = file.suffix in (".safetensors", ".bin", ".pt", ".pth") or file.name == INDEX
            if file.is_file() and not weights and not file.name.startswith("."):
                yield file


class FolderWriter:
    """Writes a folder like ``source``: the same files, tensors and dtypes, other values.

    Tensors may come in any order. The folder has its name only after ``finish``; before, and after a
    crash, it is ``NAME.partial``. Raises CheckpointError where ``path`` exists.
    """

    def __init__(self, path: str | Path, source: HFFolder) -> None:
        self.path, self.source = Path(path), source
        refuse_existing(self.path)
        self.partial = self.path.with_name(self.path.name + ".partial")
        shutil.rmtree(self.partial, ignore_errors=True)
        self.partial.mkdir(parents=True)
        self.entries = _lay_out(self.partial, source.entries)
        self.missing = set(self.entries)

    def write(self, name: str, tensor: Tensor) -> None:
        """Put ``tensor`` in its place, in the source's dtype."""
        entry = self.entries[name]
        if tuple(tensor.shape) != entry.shape:
            raise CheckpointError(f"{name}: expected shape {entry.shape}, found {tuple(tensor.shape)}")
        data = tensor.detach().to("cpu", DTYPES[entry.dtype]).contiguous().view(-1).view(torch.uint8)
        with open(self.partial / entry.file, "r+b", buffering=0) as file:
            file.seek(entry.start)
            file.write(memoryview(data.numpy()))
        self.missing.discard(name)

    def finish(self) -> None:
        """Carry over what was not written, the index and the other files, and give the folder its name."""
        for name in sorted(self.missing):
            self.write(name, self.source.tensor(name))
        if self.source.index:
            weight_map = {name: entry.file for name, entry in sorted(self.entries.items())}
            index = {**self.source.index, "weight_map": weight_map}
            text = json.dumps(index, indent=2, sort_keys=True) + "\n"
            (self.partial / INDEX).write_text(text, encoding="utf-8")
        for file in self.source.other_files():
            shutil.copy2(file, self.partial / file.name)
        sync_files(self.partial)
        self.partial.rename(self.path)


def sync_files(folder: Path) -> None:
    """Wait until all files of ``folder`` are on disk."""
    for file in folder.iterdir():
        with open(file, "rb") as opened:
            os.fsync(opened.fileno())


def refuse_existing(path: Path) -> None:
    if path.exists():
        raise CheckpointError(f"{path}: exists already; choose another output or remove it")


def _read_index(folder: Path) -> dict[str, Any] | None:
    file = folder / INDEX
    if not file.is_file():
        return None
    try:
        index = json.loads(file.read_text(encoding="utf-8"))
        index["weight_map"].items()
    except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{file}: not an index of safetensors files: {error}") from None
    return index


def _read_header(file: Path) -> dict[str, Entry]:
    """Every tensor of one safetensors file, in the order of the file."""
    try:
        with open(file, "rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            size = os.fstat(opened.fileno()).st_size
            header = json.loads(opened.read(length)) if 8 + length <= size else None
    except FileNotFoundError:
        raise CheckpointError(f"{file}: no such file") from None
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{file}: not a safetensors file: {error}") from None
    if not isinstance(header, dict):
        raise CheckpointError(f"{file}: not a safetensors file, or truncated ({size} bytes)")
    entries = {}
    for name, item in header.items():
        if name == "__metadata__":
            continue
        if item["dtype"] not in DTYPES:
            raise CheckpointError(f"{file}: {name}: dtype {item['dtype']} is not one of {', '.join(DTYPES)}")
        start, stop = item["data_offsets"]
        entry = Entry(file.name, item["dtype"], tuple(item["shape"]), 8 + length + start)
        if entry.nbytes != stop - start:
            raise CheckpointError(f"{file}: {name}: shape {entry.shape} does not fill {stop - start} bytes")
        if (end := 8 + length + stop) > size:
            raise CheckpointError(f"{file}: truncated: {name} ends at byte {end}, the file has {size} bytes")
        entries[name] = entry
    return entries


def _check_index(folder: Path, index: dict[str, Any], stored: dict[str, Entry]) -> None:
    for name, file in index["weight_map"].items():
        if name not in stored:
            raise CheckpointError(f"{folder / file}: {name} is missing, though {INDEX} places it there")


def _unfused(name: str, entry: Entry) -> Iterable[tuple[str, Entry]]:
    """The entry itself, or one per expert and projection where they are fused."""
    match = FUSED_EXPERTS.fullmatch(name)
    if match is None:
        yield name, entry
        return
    parts = ["gate_proj", "up_proj"] if match[2] == "gate_up_proj" else ["down_proj"]
    experts, rows, columns = entry.shape
    piece = replace(entry, shape=(rows // len(parts), columns))
    for expert in range(experts):
        for part, projection in enumerate(parts):
            start = entry.start + (expert * len(parts) + part) * piece.nbytes
            yield f"{match[1]}.{expert}.{projection}.weight", replace(piece, start=start)


def _lay_out(folder: Path, entries: dict[str, Entry]) -> dict[str, Entry]:
    """Create the files with headers and room for all data; returns where each tensor goes."""
    placed = {}
    for file in sorted({entry.file for entry in entries.values()}):
        here = {name: entry for name, entry in entries.items() if entry.file == file}
        header, offset = {"__metadata__": {"format": "pt"}}, 0
        for name, entry in here.items():
            stop = offset + entry.nbytes
            header[name] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": [offset, stop]}
            offset = stop
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        with open(folder / file, "wb") as opened:
            opened.write(len(text).to_bytes(8, "little") + text)
            opened.truncate(8 + len(text) + offset)
        for name, entry in here.items():
            placed[name] = replace(entry, start=8 + len(text) + header[name]["data_offsets"][0])
    return placed
