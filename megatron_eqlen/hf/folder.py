"""Hugging Face folders on disk: read any part of any tensor, write tensors in any order, check that a folder
holds every trained tensor of a model. Training, conversion and weight sync share this reader."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import re
import shutil
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import _TYPES, save_file
from torch import Tensor

from megatron_eqlen.files import is_lfs_pointer, read_json, write_json
from megatron_eqlen.hf.config import ModelConfig, read_config
from megatron_eqlen.hf.families import HEAD, embedding, weight_map
from megatron_eqlen.hf.hub import TEMPLATES
from megatron_eqlen.hf.weight_map import Weight

logger = logging.getLogger(__name__)

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

DTYPES: dict[str, torch.dtype] = _TYPES
"""Dtypes of the format, by its names."""

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".index.json")
"""Endings of the names of files that hold weights, or of an index of such files."""

# ``model.layers.0.mlp.experts.gate_up_proj``
FUSED_EXPERTS = re.compile(r"(.*\.mlp\.experts)\.(gate_up_proj|down_proj)")


class WeightsError(ValueError):
    """Weights that cannot be read or written; the message names the file and the tensor."""


@dataclass(frozen=True)
class Entry:
    """A tensor of a folder, and where it is stored."""

    file: str
    dtype: str
    """Key of ``DTYPES``."""
    shape: tuple[int, ...]
    stored: str
    """Name of the tensor in the file; with ``expert``, of the fused tensor that holds this one."""
    expert: int | None = None
    start: int = 0
    """First row of a fused expert's projection."""


class HFFolder:
    """Tensors of a folder with ``model.safetensors``, or else an index and its shards.

    Like Transformers (``modeling_utils._get_resolved_checkpoint_files``) it ignores an index beside
    ``model.safetensors``, with a warning. Experts fused on disk (``experts.gate_up_proj [experts, 2 x width,
    hidden]``) appear one by one, as in Qwen's checkpoints. Raises WeightsError for missing or bad files.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not self.path.is_dir():
            raise WeightsError(f"{self.path}: no such folder")
        self.index = None if (self.path / SINGLE).is_file() else _read_index(self.path)
        self.files = sorted(set(self.index["weight_map"].values())) if self.index else [SINGLE]
        if not self.index and (self.path / INDEX).is_file():
            say_once(f"{self.path / INDEX}: ignored as stale, as Transformers does: {SINGLE} is beside it")
        self._opened = {file: _open(self.path / file) for file in self.files}
        self.entries = self._read_entries()

    def tensor(self, name: str) -> Tensor:
        """Return the tensor, mapped from disk: pages are read on use."""
        entry = self.entries[name]
        stored = self._opened[entry.file]
        if entry.expert is None:
            return stored.get_tensor(entry.stored)
        # [experts, rows, columns] in the file: only the expert's rows are read.
        return stored.get_slice(entry.stored)[entry.expert, entry.start : entry.start + entry.shape[0]]

    def check_vllm_reads_the_same(self) -> None:
        """Raise WeightsError if vLLM would load other files (``model_loader/default_loader.py``)."""
        index = _read_index(self.path) if (self.path / INDEX).is_file() else None
        present = {file.name for file in self.path.glob("*.safetensors")}
        theirs = set(index["weight_map"].values()) if index else present
        if theirs != set(self.files):
            differ = f"Transformers loads {first_few(self.files)}, vLLM would load {first_few(theirs)}"
            raise WeightsError(f"{self.path}: {differ}: remove what is stale, {INDEX} or *.safetensors")

    def _read_entries(self) -> dict[str, Entry]:
        entries: dict[str, Entry] = {}
        for file in self.files:
            for stored in _entries(self.path / file, self._opened[file]):
                for single, entry in _unfused(self.path, stored):
                    # Two files must not both hold a tensor: which one counts would be chance.
                    if (known := entries.setdefault(single, entry)) is not entry:
                        raise WeightsError(f"{self.path / file}: {single} is in {known.file} already")
        # Fused experts stand under the name of their tensor, too.
        files = {name: each.file for single, each in entries.items() for name in (single, each.stored)}
        for name, file in self.index["weight_map"].items() if self.index else ():
            if files.get(name) != file:
                raise WeightsError(f"{self.path / file}: {name} is missing, though {INDEX} has it there")
        return entries


class FolderWriter:
    """Write a folder like ``source`` into the empty folder ``path``: the same files and tensors, other
    values. Dtypes are the source's, or wider where ``at_least`` is, so that nothing trained is rounded. A
    file is in memory until it has all its tensors, which may come in any order; ``finish`` completes it."""

    def __init__(self, path: Path, source: HFFolder, at_least: torch.dtype | None = None) -> None:
        self.path, self.source = path, source
        own = {name: DTYPES[entry.dtype] for name, entry in source.entries.items()}
        # integers, of positions for instance, are no weights
        weights = {name: each for name, each in own.items() if each.is_floating_point}
        self._dtypes = own | {n: torch.promote_types(each, at_least or each) for n, each in weights.items()}
        self._wider = {each for name, each in self._dtypes.items() if each != own[name]}
        self._bytes = 0
        self._missing: dict[str, set[str]] = defaultdict(set)
        """Tensors by file that are not written yet."""
        for name, entry in source.entries.items():
            self._missing[entry.file].add(name)
        self._held: dict[str, dict[str, Tensor]] = defaultdict(dict)

    def write(self, name: str, tensor: Tensor) -> None:
        """Write ``tensor``. Raises WeightsError if it does not fit."""
        entry = self.source.entries[name]
        if tuple(tensor.shape) != entry.shape:
            raise WeightsError(f"{name}: expected shape {entry.shape}, found {tuple(tensor.shape)}")
        # A copy: the caller may use its buffer again.
        held = tensor.detach().to("cpu", self._dtypes[name], copy=True).contiguous()
        self._held[entry.file][name] = held
        self._bytes += held.nbytes
        self._missing[entry.file].discard(name)
        if not self._missing[entry.file]:
            save_tensors(self._held.pop(entry.file), self.path / entry.file)

    def finish(self) -> None:
        """Copy the tensors that were not written, the index and the other files from the source."""
        for name in [name for names in self._missing.values() for name in names]:
            self.write(name, self.source.tensor(name))
        # With fused experts taken apart and wider dtypes names and size differ from the source's.
        if self.source.index:
            weight_map = {name: entry.file for name, entry in sorted(self.source.entries.items())}
            size = {"metadata": {"total_size": self._bytes}} if self._wider else {}
            index = {**self.source.index, "weight_map": weight_map, **size}
            text = json.dumps(index, indent=2, sort_keys=True) + "\n"
            (self.path / INDEX).write_text(text, encoding="utf-8")
        # configuration, tokenizer, generation settings, chat templates
        if (templates := self.source.path / TEMPLATES).is_dir():
            shutil.copytree(templates, self.path / TEMPLATES)
        for file in filter(Path.is_file, self.source.path.iterdir()):
            if not file.name.endswith(WEIGHT_SUFFIXES) and not file.name.startswith("."):
                shutil.copy2(file, self.path / file.name)
        if self._wider:
            (wider,) = self._wider  # of at_least and one dtype of the source
            config = self.path / "config.json"
            write_json(config, _of_dtype(read_json(config), str(wider).removeprefix("torch.")))


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raise ValueError with the free disk space if the block cannot write ``path``: neither torch nor
    safetensors raises OSError for a full disk."""
    from torch.distributed.checkpoint.api import CheckpointException  # slow to import

    try:
        yield
    except (CheckpointException, SafetensorError, OSError) as error:
        # torch's is on every rank, and has the reasons on rank 0 alone
        reasons = [*getattr(error, "failures", {0: (error,)}).values(), ("see the message of rank 0",)]
        free = shutil.disk_usage(path.parent).free / 1e9
        raise ValueError(f"{path}: could not be written: {reasons[0][0]} ({free:.2f} GB free)") from None


def save_tensors(tensors: dict[str, Tensor], file: Path) -> None:
    """Write a safetensors file with the rights of its folder: the library makes it its owner's alone."""
    with writing(file):
        save_file(tensors, file, metadata={"format": "pt"})
        with contextlib.suppress(PermissionError):  # a file system without rights, such as a USB stick's
            file.chmod(file.parent.stat().st_mode & 0o666)


def _of_dtype(config: dict[str, Any], name: str) -> dict[str, Any]:
    """Return a config.json whose dtype, and that of its ``text_config``, is ``name``."""
    changed: dict[str, Any] = {key: name for key in ("dtype", "torch_dtype") if key in config}
    if isinstance(text := config.get("text_config"), dict):
        changed["text_config"] = _of_dtype(text, name)
    return config | changed


def first_few(names: Collection[str]) -> str:
    """Return the first three names in alphabetical order, and the number of the others."""
    few = ", ".join(sorted(names)[:3])
    return f"{few} and {len(names) - 3} more" if len(names) > 3 else few or "nothing"


@functools.cache
def say_once(message: str) -> None:
    """Log a warning once per process, on the first rank only."""
    if int(os.environ.get("RANK", 0)) == 0:
        logger.warning(message)


def _open(file: Path) -> Any:
    try:
        return safe_open(file, "pt")
    except FileNotFoundError:
        raise WeightsError(f"{file}: no such file") from None
    except (SafetensorError, OSError) as error:
        if is_lfs_pointer(file):
            raise WeightsError(f"{file}: a pointer of Git LFS: run git lfs pull there") from None
        raise WeightsError(f"{file}: not a safetensors file, or truncated: {error}") from None


def _entries(file: Path, opened: Any) -> Iterator[Entry]:
    """Yield the tensors of a file in their order there."""
    for name in opened.offset_keys():
        part = opened.get_slice(name)
        if part.get_dtype() not in DTYPES:
            raise WeightsError(f"{file}: {name}: dtype {part.get_dtype()} is not supported")
        yield Entry(file.name, part.get_dtype(), tuple(part.get_shape()), name)


def _read_index(folder: Path) -> dict[str, Any]:
    file = folder / INDEX
    if not file.exists():
        # Weights of another format, or an adapter, are the usual mistakes.
        others = sorted(each.name for each in folder.iterdir() if each.name.endswith(WEIGHT_SUFFIXES))
        found = f"neither, but {first_few(others)}" if others else "neither"
        if (folder / "adapter_config.json").is_file():
            found += ": a PEFT adapter, which model.path cannot name: merge it into its model"
        raise WeightsError(f"{folder}: expected {SINGLE} or {INDEX}, found {found}")
    try:
        index = read_json(file)
    except ValueError as error:
        raise WeightsError(str(error)) from None
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise WeightsError(f"{file}: not an index of safetensors files: no weight_map")
    # A path in an index could lead out of the folder.
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or Path(shard).name != shard or not shard.isprintable():
            raise WeightsError(f"{file}: {name!a}: expected the name of a file beside it, found {shard!a}")
    return index


def _unfused(folder: Path, stored: Entry) -> Iterator[tuple[str, Entry]]:
    """Yield the entry itself, or one entry per expert and projection if they are fused."""
    match = FUSED_EXPERTS.fullmatch(stored.stored)
    if match is None:
        yield stored.stored, stored
        return
    parts = ["gate_proj", "up_proj"] if match[2] == "gate_up_proj" else ["down_proj"]
    if len(stored.shape) != 3 or stored.shape[1] % len(parts):
        expected = "[experts, 2 x width, hidden]" if len(parts) == 2 else "[experts, hidden, width]"
        where = f"{folder / stored.file}: {stored.stored}"
        raise WeightsError(f"{where}: expected shape {expected}, found {list(stored.shape)}")
    # [experts, 2 x width, hidden]: the gate's rows, then those of up.
    experts, rows, columns = stored.shape
    rows //= len(parts)
    for expert in range(experts):
        for part, projection in enumerate(parts):
            piece = replace(stored, shape=(rows, columns), expert=expert, start=part * rows)
            yield f"{match[1]}.{expert}.{projection}.weight", piece


WEIGHT_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
"""Dtypes that a trained tensor may have on disk."""

UNTRAINED = ("mtp.", "model.visual.")
"""Beginnings of names that are converted, not trained: multi-token prediction, Qwen3.5's image encoder."""


def with_tied_head(
    tensors: Iterable[tuple[str, Tensor]], model: ModelConfig, folder: HFFolder
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors, and embeddings again as the output layer that ``folder`` stores tied."""
    (embeddings,) = embedding(model).hf
    for name, tensor in tensors:
        yield name, tensor
        if name == embeddings and model.tie_word_embeddings and HEAD in folder.entries:
            yield HEAD, tensor


def check_folder(folder: HFFolder, model: ModelConfig) -> dict[str, Weight]:
    """Return the weights by Megatron name if ``folder`` has all in their shapes; warn of unused ones."""
    family = read_config(folder.path).model_type
    if family != model.model_type:
        raise WeightsError(f"{folder.path}: expected a {model.model_type} model, found {family}")
    weights = weight_map(model)
    for weight in weights:
        for name, shape in zip(weight.hf, weight.shapes, strict=True):
            _check_tensor(folder, name, shape)
    by_name = {weight.megatron: weight for weight in weights}
    if model.tie_word_embeddings:  # the last pipeline stage keeps a copy
        by_name["output_layer.weight"] = embedding(model)
        _check_tied(folder, weights[0])
    # GLM's layer after the last predicts further tokens.
    carried = UNTRAINED + (f"{model.prefix}layers.{model.num_hidden_layers}.",) * model.family.glm
    # A head may be stored beside tied embeddings: ``_check_tied`` has compared them.
    expected = {name for weight in weights for name in weight.hf} | {HEAD}
    unused = [name for name in folder.entries if name not in expected and not name.startswith(carried)]
    if unused:
        say_once(f"{folder.path}: the model has no use for {first_few(unused)}: not trained")
    return by_name


def _check_tensor(folder: HFFolder, name: str, shape: tuple[int, ...]) -> None:
    entry = folder.entries.get(name)
    if entry is None:
        raise WeightsError(f"{folder.path}: {name} is missing")
    where = f"{folder.path / entry.file}: {name}"
    if entry.shape != shape:
        raise WeightsError(f"{where}: expected shape {shape}, found {entry.shape}")
    if DTYPES[entry.dtype] not in WEIGHT_DTYPES:
        expected = "F32, BF16, F16 or F64 (dequantise a quantised model first)"
        raise WeightsError(f"{where}: {entry.dtype} is not a weight's dtype: expected {expected}")


def _check_tied(folder: HFFolder, embeddings: Weight) -> None:
    """Raise WeightsError if an output layer differs from tied embeddings: only vLLM would tie them."""
    if HEAD not in folder.entries:
        return
    _check_tensor(folder, HEAD, embeddings.shapes[0])
    (name,) = embeddings.hf
    # Some rows at a time, in a dtype that holds all others exactly.
    rows = (folder.tensor(each).split(4096) for each in (name, HEAD))
    if not all(torch.equal(row.double(), other.double()) for row, other in zip(*rows, strict=True)):
        remedy = f"Set it to false to use {HEAD}, as Transformers does, or remove that tensor"
        differs = f"config.json has tie_word_embeddings: true, but {HEAD} differs from {name}"
        raise WeightsError(f"{folder.path}: {differs}. {remedy}")
