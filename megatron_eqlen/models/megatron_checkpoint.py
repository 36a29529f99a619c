"""Megatron ``torch_dist`` checkpoints, one tensor at a time.

``megatron.core.dist_checkpointing`` saves and loads whole models. For conversion this module reads and writes
the same files (torch.distributed.checkpoint's format) tensor by tensor. The names of a model's tensors and
their division come from Megatron itself: the model is built on the meta device without parallelism, and its
sharded state dict is read. The format does not depend on the layout: a checkpoint saved at TP2 x PP2 can be
read here, and a checkpoint written here loads at any layout.
"""

from __future__ import annotations

import io
import logging
import math
import pickle
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.core import CheckpointingConfig, maybe_load_config, save_config
from megatron.core.dist_checkpointing.dict_utils import (
    dict_list_map_inplace,
    extract_matching_values,
    merge,
    nested_values,
)
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, apply_factories
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.utils import _create_file_view

from megatron_eqlen.files import CheckpointError
from megatron_eqlen.hf.config import ModelConfig
from megatron_eqlen.hf.folder import first_few
from megatron_eqlen.hf.folder_check import WEIGHT_DTYPES
from megatron_eqlen.models import checkpoint_folder
from megatron_eqlen.models.build import build_meta_model
from megatron_eqlen.models.names import local_parameters
from megatron_eqlen.processes.distributed import agree
from megatron_eqlen.recipe import LoraRecipe

logger = logging.getLogger(__name__)

FILE_BYTES = 8 << 30
"""Size of a data file after which the next file begins."""

UNREADABLE = (
    OSError, EOFError, pickle.UnpicklingError, AttributeError, ImportError, IndexError, KeyError, TypeError,
    ValueError, RuntimeError,
)  # fmt: skip
"""Errors that unpickling raises for damaged bytes (docs.python.org/3/library/pickle.html, torch.load)."""

METADATA = ".metadata"
ALLOWED = {
    "torch": r"Size|bool|u?int\d+|float\d+|bfloat16|float8_\w+|complex\d+",
    "torch.serialization": "_get_layout",
    "torch.distributed.checkpoint.metadata": "Metadata|TensorStorageMetadata|BytesStorageMetadata|"
    "ChunkStorageMetadata|MetadataIndex|TensorProperties|StorageMeta|_MEM_FORMAT_ENCODING",
    "torch.distributed.checkpoint.planner": "SavePlan|WriteItem|WriteItemType|TensorWriteData|"
    "BytesIOWriteData",
    "torch.distributed.checkpoint.filesystem": "_StorageInfo",
    "pathlib": "PosixPath|PurePosixPath",
}
"""Names that ``.metadata`` may import, by module: the data classes that it consists of, and their fields."""

LORA = "lora"
"""Key of the recipe of adapters in a checkpoint's content metadata; None: it holds all weights."""

OPTIMIZER = re.compile(r"(chained_\d+\.)?optimizer\.")
"""Prefix of keys that do not belong to the model."""

ADAPTER = re.compile(r"\.adapter\.[AB]\.\d+$")
"""End of keys of adapters' matrices."""


@dataclass(frozen=True)
class Piece:
    """Contiguous range of a parameter, and its place in a tensor of the checkpoint."""

    start: int
    """First element in the flattened parameter."""
    key: str
    size: tuple[int, ...]
    """Shape of the checkpoint's tensor."""
    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def stop(self) -> int:
        return self.start + math.prod(self.shape)


@dataclass(frozen=True)
class CheckpointLayout:
    """Names and shapes of everything in a checkpoint of a model."""

    shapes: dict[str, tuple[int, ...]]
    """Pieces of each parameter, by its name in the weight map."""
    pieces: dict[str, list[Piece]]
    objects: list[str]
    """Keys of entries that are not tensors: empty extra states."""


def checkpoint_layout(model: ModelConfig) -> CheckpointLayout:
    """Return the layout of ``model``'s checkpoint, from Megatron. Its groups must be started, without any
    parallelism."""
    chunk = build_meta_model(model)
    parameters = local_parameters([chunk])
    names = {_storage(parameter): name for name, parameter in parameters.items()}
    state = chunk.sharded_state_dict(metadata=checkpoint_metadata())
    apply_factories(state)
    shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
    layout = CheckpointLayout(shapes, {name: [] for name in parameters}, [])
    for item in nested_values(state):
        if isinstance(item, ShardedObject):
            layout.objects.append(item.unique_key)
        elif isinstance(item, ShardedTensor):
            assert item.data is not None
            layout.pieces[names[_storage(item.data)]].append(_piece(item, item.data))
    return layout


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str, /) -> Any:
        if not re.fullmatch(ALLOWED.get(module_name, ""), global_name):
            raise CheckpointError(f"names {module_name}.{global_name}, which no index of a checkpoint needs")
        return super().find_class(module_name, global_name)


def read_metadata(path: Path) -> Metadata:
    """Return the index of a checkpoint: every tensor's shape, dtype and place. Raises CheckpointError, also
    for an index that would run code; nothing of that has run then."""
    file = path / METADATA
    try:
        with open(file, "rb") as opened:
            metadata = _MetadataUnpickler(opened).load()
    except CheckpointError as error:
        raise CheckpointError(f"{file}: {error}") from None
    except UNREADABLE as error:
        raise CheckpointError(f"{file}: cannot be read: {error!r}") from None
    if not isinstance(metadata, Metadata):
        raise CheckpointError(f"{file}: cannot be read: expected Metadata, found {type(metadata).__name__}")
    return metadata


def content_metadata(path: Path) -> dict[str, Any]:
    """Return what a run noted of its checkpoint (``training.sharded_state.content``); {} of other software.
    Raises CheckpointError."""
    check_objects(path)  # Megatron reads them again, with plain unpicklers
    return dist_checkpointing.load_content_metadata(str(path)) or {}


def load_sharded(state: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return ``state``, a sharded state dict, filled from the checkpoint ``path`` by Megatron. Collective.
    Raises CheckpointError for an index or an object that cannot be read or might run code.

    Modules' extra states are None: Transformer Engine keeps fp8 state there, which is not used here, and
    saves extra states for modules that have none without it.
    """
    if fault := agree(lambda: _index_fault(path)):
        raise CheckpointError(fault)
    extra, kept = extract_matching_values(state, _is_extra_state)
    assert isinstance(kept, dict)  # as ``state`` is
    dict_list_map_inplace(lambda _: None, extra)
    loaded = dist_checkpointing.load(kept, str(path))
    assert isinstance(loaded, dict)  # a tuple only if mismatched keys are requested
    merge(loaded, extra)
    return loaded


def check_objects(path: Path) -> None:
    """Raise CheckpointError if an object that Megatron would unpickle holds more than plain data and
    tensors, and so might run code."""
    metadata = read_metadata(path)
    for index, stored in metadata.storage_data.items():
        kind = metadata.state_dict_metadata.get(index.fqn)
        if not isinstance(kind, BytesStorageMetadata) or "_extra_state" in index.fqn:
            continue
        file = path / stored.relative_path
        try:
            with open(file, "rb") as opened:
                opened.seek(stored.offset)
                content = io.BytesIO(opened.read(stored.length))
            torch.load(content, map_location="cpu", weights_only=True)
        except UNREADABLE as error:
            raise CheckpointError(f"{file}: {index.fqn}: is no plain data: {error}") from None


def _index_fault(path: Path) -> str | None:
    try:
        check_objects(path)
    except CheckpointError as error:
        return str(error)
    return None


def _is_extra_state(item: object) -> bool:
    return isinstance(item, ShardedObject) and item.key.endswith("_extra_state")


def checkpoint_metadata() -> dict[str, Any]:
    """Return the metadata of sharded state dicts: one tensor per weight, for every layout."""
    return {
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        "singleton_local_shards": False,
    }


class CheckpointReader:
    """Reader of a checkpoint's parameters, for any layout that saved it. Raises CheckpointError.

    ``path``: a checkpoint, or a folder with a ``latest`` file. The checkpoint is verified against its
    manifest; checkpoints of other software have none, which is logged as a warning.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = _resolve(Path(path))
        if (self.path / checkpoint_folder.MANIFEST).exists():
            checkpoint_folder.verify(self.path)
        else:
            logger.warning("%s: no %s: its bytes are not checked", self.path, checkpoint_folder.MANIFEST)
        self.metadata = read_metadata(self.path)
        try:
            ends = _ends(self.metadata)
        except UNREADABLE as error:
            raise CheckpointError(f"{self.path / METADATA}: cannot be read: {error!r}") from None
        self._check_files(ends)

    @cached_property
    def lora(self) -> LoraRecipe | None:
        """Recipe of the adapters that the checkpoint holds in place of all weights."""
        if not any(ADAPTER.search(key) for key in self.metadata.state_dict_metadata):
            return None
        content = content_metadata(self.path)
        if LORA not in content:
            raise CheckpointError(
                f"{self.path}: has adapters, but not their alpha: saved by an older version. Resume the run "
                "for a step: its next checkpoint has it"
            )
        return LoraRecipe.model_validate(content[LORA])

    def check(self, layout: CheckpointLayout) -> None:
        """Raise CheckpointError unless the checkpoint holds exactly the layout's tensors: all of them, in
        their shapes, as floating-point numbers, and no others."""
        pieces = [piece for pieces in layout.pieces.values() for piece in pieces]
        for piece in pieces:
            self._tensor(piece)
        stored = {
            key
            for key, item in self.metadata.state_dict_metadata.items()
            if isinstance(item, TensorStorageMetadata) and not OPTIMIZER.match(key)
        }
        if unknown := stored - {piece.key for piece in pieces}:
            raise CheckpointError(
                f"{self.path}: the model has no place for {first_few(unknown)}: another model's checkpoint?"
            )

    def parameter(self, layout: CheckpointLayout, name: str) -> Tensor:
        """Return the complete parameter ``name``, in the checkpoint's dtype."""
        pieces, shape = layout.pieces[name], layout.shapes[name]
        if len(pieces) == 1 and len(items := self._items(pieces[0])) == 1:
            return self._load(items[0]).reshape(shape)
        flat = torch.empty(math.prod(shape), dtype=self._tensor(pieces[0]).properties.dtype)
        for piece in pieces:
            target = flat[piece.start : piece.stop].view(piece.shape)
            for item in self._items(piece):
                _box(target, item.dest_offsets, item.lengths).copy_(self._load(item))
        return flat.view(shape)

    def _items(self, piece: Piece) -> list[ReadItem]:
        """Return the reads for ``piece``, which may have been saved in parts, or as part of a larger
        tensor."""
        chunk = ChunkStorageMetadata(torch.Size(piece.offset), torch.Size(piece.shape))
        stored = self._tensor(piece)
        if (piece.key, piece.offset, piece.shape) in self._chunks:  # avoids a comparison with all 512 experts
            stored = TensorStorageMetadata(stored.properties, stored.size, [chunk])
        items = create_read_items_for_chunk_list(piece.key, stored, [chunk])
        if sum(math.prod(item.lengths) for item in items) != math.prod(piece.shape):
            raise CheckpointError(f"{self.path}: {piece.key}: some of it was never saved")
        return items

    @cached_property
    def _chunks(self) -> set[tuple[str, tuple[int, ...], tuple[int, ...]]]:
        """Key, offset and shape of everything that was saved as one part."""
        return {
            (key, tuple(chunk.offsets), tuple(chunk.sizes))
            for key, item in self.metadata.state_dict_metadata.items()
            if isinstance(item, TensorStorageMetadata)
            for chunk in item.chunks
        }

    def _load(self, item: ReadItem) -> Tensor:
        stored = self.metadata.storage_data[item.storage_index]
        try:
            with open(self.path / stored.relative_path, "rb") as file:
                view = _create_file_view(file, stored.offset, stored.length)
                tensor = torch.load(cast(BinaryIO, view), map_location="cpu", weights_only=True)
            return _box(tensor, item.storage_offsets, item.lengths)
        except UNREADABLE as error:
            file = self.path / stored.relative_path
            raise CheckpointError(f"{file}: {item.storage_index.fqn}: damaged: {error!r}") from None

    def _tensor(self, piece: Piece) -> TensorStorageMetadata:
        stored = self.metadata.state_dict_metadata.get(piece.key)
        if not isinstance(stored, TensorStorageMetadata):
            raise CheckpointError(f"{self.path}: {piece.key} is missing: another model's checkpoint?")
        if tuple(stored.size) != piece.size:
            raise CheckpointError(
                f"{self.path}: {piece.key}: expected shape {piece.size}, found {tuple(stored.size)}"
            )
        if (dtype := stored.properties.dtype) not in WEIGHT_DTYPES:
            raise CheckpointError(f"{self.path}: {piece.key}: {dtype} is not a weight's dtype")
        return stored

    def _check_files(self, ends: dict[str, int]) -> None:
        for name, end in ends.items():
            file = self.path / name
            if not file.is_file():
                raise CheckpointError(f"{file}: no such file")
            if (size := file.stat().st_size) < end:
                raise CheckpointError(f"{file}: truncated: expected {end} bytes, found {size}")


class CheckpointWriter:
    """Write a checkpoint into the empty folder ``path``; it is complete after ``finish``."""

    def __init__(self, path: Path, layout: CheckpointLayout) -> None:
        self.path, self.layout = path, layout
        self.tensors: dict[str, TensorStorageMetadata] = {}
        self.stored: dict[MetadataIndex, _StorageInfo] = {}
        self.files = 0
        self._open_next()

    def write(self, name: str, parameter: Tensor) -> None:
        """Add the complete parameter ``name``."""
        flat = parameter.view(-1)
        for piece in self.layout.pieces[name]:
            data = flat[piece.start : piece.stop].view(piece.shape)
            if data.numel() != flat.numel():
                data = data.clone()  # torch.save would write a view's whole storage
            chunk = ChunkStorageMetadata(torch.Size(piece.offset), torch.Size(piece.shape))
            properties = TensorProperties.create_from_tensor(data)
            empty = TensorStorageMetadata(properties, torch.Size(piece.size), [])
            self.tensors.setdefault(piece.key, empty).chunks.append(chunk)
            self._save(MetadataIndex(piece.key, chunk.offsets), data)

    def finish(self) -> None:
        objects = {key: BytesStorageMetadata() for key in self.layout.objects}
        for key in objects:
            self._save(MetadataIndex(key), [None])  # objects are saved as lists, as by Megatron
        self.file.close()
        metadata = Metadata(state_dict_metadata={**self.tensors, **objects}, storage_data=self.stored)
        (self.path / ".metadata").write_bytes(pickle.dumps(metadata))
        torch.save({}, self.path / "common.pt")
        save_config(CheckpointingConfig("torch_dist"), str(self.path))
        names = checkpoint_folder.file_names(self.path)
        checkpoint_folder.write_manifest(self.path, checkpoint_folder.describe(self.path, names))

    def _save(self, index: MetadataIndex, data: Tensor | list[None]) -> None:
        if self.file.tell() >= FILE_BYTES:
            self._open_next()
        start = self.file.tell()
        torch.save(data, self.file)
        self.stored[index] = _StorageInfo(Path(self.file.name).name, start, self.file.tell() - start)

    def _open_next(self) -> None:
        if self.files:
            self.file.close()
        self.file: io.BufferedWriter = open(self.path / f"__0_{self.files}.distcp", "wb")  # noqa: SIM115
        self.files += 1


def _box(tensor: Tensor, offsets: Sequence[int], lengths: Sequence[int]) -> Tensor:
    for dim, (offset, length) in enumerate(zip(offsets, lengths, strict=True)):
        tensor = tensor.narrow(dim, offset, length)
    return tensor


def _ends(metadata: Metadata) -> dict[str, int]:
    """Return the minimum number of bytes of each data file."""
    ends: dict[str, int] = {}
    for info in metadata.storage_data.values():
        ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
    return ends


def _storage(tensor: Tensor) -> int:
    """Return an identifier of the memory of a tensor or view; works on the meta device, too."""
    return tensor.untyped_storage()._cdata


def _piece(item: ShardedTensor, data: Tensor) -> Piece:
    return Piece(
        start=int(data.storage_offset()),
        key=item.key,
        size=tuple(item.global_shape),
        offset=tuple(item.global_offset),
        shape=(1,) * item.prepend_axis_num + tuple(item.local_shape),
    )


def _resolve(path: Path) -> Path:
    path = checkpoint_folder.latest(path) or path
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such folder")
    try:
        config = maybe_load_config(str(path))
    except UNREADABLE as error:
        raise CheckpointError(f"{path / 'metadata.json'}: cannot be read: {error!r}") from None
    if config is None:
        raise CheckpointError(f"{path}: no metadata.json: not a Megatron checkpoint, or an incomplete one")
    if config.sharded_backend != "torch_dist":
        raise CheckpointError(
            f"{path / 'metadata.json'}: expected a torch_dist checkpoint, found {config.sharded_backend!r}"
        )
    return path
