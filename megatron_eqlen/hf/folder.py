"""Hugging Face folders on disk: read any part of any tensor, write tensors in any order.

Training, conversion and weight sync share this reader. Tensors are mapped one at a time and written one at a
time into files whose layout is known in advance.
"""

from __future__ import annotations

import functools
import json
import logging
import math
import os
import re
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_eqlen.files import CheckpointError, read_json
from megatron_eqlen.hf.safetensors_header import Entry, read_header, write_header

logger = logging.getLogger(__name__)

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""PyTorch's dtype for each of ``safetensors_header.ITEM_BYTES``."""

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".index.json")
"""Endings of the names of files that hold weights, or of an index of such files."""

FUSED_EXPERTS = re.compile(r"(.*\.mlp\.experts)\.(gate_up_proj|down_proj)")


class HFFolder:
    """Tensors of a folder with ``model.safetensors``, or else an index and its shards.

    This is Transformers' order (``modeling_utils._get_resolved_checkpoint_files``): an index beside
    ``model.safetensors`` is ignored, with a warning. Experts that are fused on disk (``experts.gate_up_proj
    [experts, 2 x width, hidden]``) appear individually, as in the checkpoints that Qwen publishes. Raises
    CheckpointError for anything missing or broken.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not self.path.is_dir():
            raise CheckpointError(f"{self.path}: no such folder")
        self.index = None if (self.path / SINGLE).is_file() else _read_index(self.path)
        self.files = sorted(set(self.index["weight_map"].values())) if self.index else [SINGLE]
        if not self.index and (self.path / INDEX).is_file():
            say_once(f"{self.path / INDEX}: ignored as stale, as Transformers does: {SINGLE} is beside it")
        self.entries = self._read_entries()

    def tensor(self, name: str) -> Tensor:
        """Return the tensor, mapped from disk: pages are read on use and dropped with the tensor."""
        entry = self.entries[name]
        if entry.nbytes == 0:
            return torch.empty(entry.shape, dtype=DTYPES[entry.dtype])
        mapped = np.memmap(
            self.path / entry.file, np.uint8, mode="c", offset=entry.start, shape=(entry.nbytes,)
        )
        return torch.frombuffer(mapped, dtype=torch.uint8).view(DTYPES[entry.dtype]).view(entry.shape)

    def other_files(self) -> Iterable[Path]:
        """Return all files except the weights: configuration, tokenizer, generation settings, chat
        template."""
        for file in sorted(self.path.iterdir()):
            if file.is_file() and not file.name.endswith(WEIGHT_SUFFIXES) and not file.name.startswith("."):
                yield file

    def check_vllm_reads_the_same(self) -> None:
        """Raise CheckpointError if vLLM would load other files than Transformers and this class: vLLM reads
        all safetensors files, or the files of an index (``model_loader/default_loader.py``)."""
        index = _read_index(self.path) if (self.path / INDEX).is_file() else None
        found = {file.name for file in self.path.glob("*.safetensors")}
        theirs = set(index["weight_map"].values()) if index else found
        if theirs != set(self.files):
            raise CheckpointError(
                f"{self.path}: Transformers loads {first_few(self.files)}, vLLM would load "
                f"{first_few(theirs)}: remove what is stale, {INDEX} or *.safetensors"
            )

    def _read_entries(self) -> dict[str, Entry]:
        entries: dict[str, Entry] = {}
        for file in self.files:
            for name, stored in read_header(self.path / file).items():
                for single, entry in _unfused(self.path, name, stored):
                    if single in entries:
                        raise CheckpointError(
                            f"{self.path / file}: {single} is in {entries[single].file} already"
                        )
                    entries[single] = entry
        if self.index:
            _check_index(self.path, self.index["weight_map"], entries)
        return entries


class FolderWriter:
    """Write a folder like ``source`` into the empty folder ``path``: the same files, tensors and dtypes with
    other values. Tensors may come in any order; the folder is complete after ``finish``."""

    def __init__(self, path: Path, source: HFFolder) -> None:
        self.path, self.source = path, source
        self.entries: dict[str, Entry] = {}
        for file in sorted({entry.file for entry in source.entries.values()}):
            here = {name: entry for name, entry in source.entries.items() if entry.file == file}
            self.entries |= write_header(path / file, here)
        self.missing = set(self.entries)

    def write(self, name: str, tensor: Tensor) -> None:
        """Write ``tensor`` to its place, in the source's dtype. Raises CheckpointError if it does not fit."""
        entry = self.entries[name]
        if tuple(tensor.shape) != entry.shape:
            raise CheckpointError(f"{name}: expected shape {entry.shape}, found {tuple(tensor.shape)}")
        _check_range(name, tensor, DTYPES[entry.dtype])
        data = tensor.detach().to("cpu", DTYPES[entry.dtype]).contiguous().view(-1).view(torch.uint8)
        with open(self.path / entry.file, "r+b", buffering=0) as file:
            file.seek(entry.start)
            _write_all(file.fileno(), data.numpy().data)
        self.missing.discard(name)

    def finish(self) -> None:
        """Copy the tensors that were not written, the index and the other files from the source."""
        for name in sorted(self.missing):
            self.write(name, self.source.tensor(name))
        if self.source.index:
            weight_map = {name: entry.file for name, entry in sorted(self.entries.items())}
            index = {**self.source.index, "weight_map": weight_map}
            text = json.dumps(index, indent=2, sort_keys=True) + "\n"
            (self.path / INDEX).write_text(text, encoding="utf-8")
        for file in self.source.other_files():
            shutil.copy2(file, self.path / file.name)


def first_few(names: Collection[str]) -> str:
    """Return the first three names in alphabetical order, and the number of the others."""
    few = ", ".join(sorted(names)[:3])
    return f"{few} and {len(names) - 3} more" if len(names) > 3 else few or "nothing"


@functools.cache
def say_once(message: str) -> None:
    """Log a warning once per process, on the first rank only."""
    if int(os.environ.get("RANK", 0)) == 0:
        logger.warning(message)


def _check_range(name: str, tensor: Tensor, dtype: torch.dtype) -> None:
    """Raise CheckpointError for a number beyond ``dtype``'s range, which would become infinity."""
    if tensor.dtype == dtype or not tensor.numel():
        return
    largest = max(abs(end.item()) for end in torch.aminmax(tensor.detach()))
    if math.isfinite(largest) and largest > torch.finfo(dtype).max:
        raise CheckpointError(
            f"{name}: {largest:g} is beyond {dtype}, the source's dtype (at most {torch.finfo(dtype).max:g})"
        )


def _write_all(handle: int, data: memoryview) -> None:
    """Write all data: the kernel writes at most 2 GiB per call."""
    while data:
        data = data[os.write(handle, data) :]


def _read_index(folder: Path) -> dict[str, Any]:
    file = folder / INDEX
    if not file.exists():
        raise CheckpointError(f"{folder}: expected {SINGLE} or {INDEX}, found neither")
    try:
        index = read_json(file)
    except ValueError as error:
        raise CheckpointError(str(error)) from None
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{file}: not an index of safetensors files: no weight_map")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or Path(shard).name != shard or not shard.isprintable():
            raise CheckpointError(f"{file}: {name!a}: expected the name of a file beside it, found {shard!a}")
    return index


def _check_index(folder: Path, weight_map: Mapping[str, str], entries: Mapping[str, Entry]) -> None:
    """Raise CheckpointError unless every tensor of the index is in the file that the index names."""
    for name, file in weight_map.items():
        for single in _single_names(name):
            if single not in entries or entries[single].file != file:
                raise CheckpointError(f"{folder / file}: {name} is missing, though {INDEX} places it there")


def _single_names(name: str) -> list[str]:
    """Return the tensor's own name, or the name of the first expert if experts are fused."""
    match = FUSED_EXPERTS.fullmatch(name)
    if match is None:
        return [name]
    return [f"{match[1]}.0.{projection}.weight" for projection in _projections(match[2])]


def _projections(fused: str) -> list[str]:
    return ["gate_proj", "up_proj"] if fused == "gate_up_proj" else ["down_proj"]


def _unfused(folder: Path, name: str, entry: Entry) -> Iterator[tuple[str, Entry]]:
    """Yield the entry itself, or one entry per expert and projection if they are fused."""
    match = FUSED_EXPERTS.fullmatch(name)
    if match is None:
        yield name, entry
        return
    parts = _projections(match[2])
    if len(entry.shape) != 3 or entry.shape[1] % len(parts):
        expected = "[experts, 2 x width, hidden]" if len(parts) == 2 else "[experts, hidden, width]"
        raise CheckpointError(
            f"{folder / entry.file}: {name}: expected shape {expected}, found {list(entry.shape)}"
        )
    experts, rows, columns = entry.shape
    piece = replace(entry, shape=(rows // len(parts), columns))
    for expert in range(experts):
        for part, projection in enumerate(parts):
            start = entry.start + (expert * len(parts) + part) * piece.nbytes
            yield f"{match[1]}.{expert}.{projection}.weight", replace(piece, start=start)
