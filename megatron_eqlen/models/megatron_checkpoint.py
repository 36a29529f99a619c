"""Megatron ``torch_dist`` checkpoints, one tensor at a time.

``megatron.core.dist_checkpointing`` saves and loads whole models. For conversion this module reads and
writes the same files (torch.distributed.checkpoint's format) tensor by tensor. What a model's tensors are
called, and how they are cut, is asked of Megatron itself: the model is built on the meta device without
parallelism and gives its sharded state dict. The format is free of layout, so a checkpoint saved at
TP2 x PP2 is read here, and one written here loads at any layout.
"""

from __future__ import annotations

import io
import math
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.core import CheckpointingConfig, maybe_load_config, save_config
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, apply_factories
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from megatron_eqlen.models.build import build_model
from megatron_eqlen.models.hf_config import ModelConfig
from megatron_eqlen.models.hf_folder import CheckpointError, sync_files
from megatron_eqlen.models.weights import local_parameters
from megatron_eqlen.recipe import ParallelRecipe

FILE_BYTES = 8 << 30
"""A new data file is begun after this many bytes."""


@dataclass(frozen=True)
class Piece:
    """A stretch of a parameter, and where it lies in a tensor of the checkpoint."""

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
    """What a checkpoint of a model holds."""

    shapes: dict[str, tuple[int, ...]]
    """Of each parameter, under its name in the weight map."""
    pieces: dict[str, list[Piece]]
    objects: list[str]
    """Keys of what is not a tensor: empty extra states."""


def checkpoint_layout(model: ModelConfig) -> CheckpointLayout:
    """Ask Megatron. Its groups must be started, without any parallelism."""
    with torch.device("meta"):
        (chunk,) = build_model(model, ParallelRecipe(), torch.float32)
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
            layout.pieces[names[_storage(item.data)]].append(_piece(item))
    return layout


def checkpoint_metadata() -> dict[str, Any]:
    """How sharded state dicts are made: as one tensor per weight, for every layout."""
    return {
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        "singleton_local_shards": False,
    }


class CheckpointReader:
    """Reads parameters of a checkpoint, whatever layout saved it. Raises CheckpointError.

    ``path``: a checkpoint, or a folder whose file ``latest`` names one.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = _resolve(Path(path))
        self.reader = FileSystemReader(self.path)
        try:
            self.metadata = self.reader.read_metadata()
        except (FileNotFoundError, EOFError, pickle.UnpicklingError) as error:
            raise CheckpointError(f"{self.path / '.metadata'}: cannot be read: {error}") from None
        self.reader.set_up_storage_reader(self.metadata, is_coordinator=True)
        self._check_files()

    def check(self, layout: CheckpointLayout) -> None:
        """Whether all of the layout is there, in its shapes."""
        for pieces in layout.pieces.values():
            for piece in pieces:
                self._tensor(piece)

    def parameter(self, layout: CheckpointLayout, name: str) -> Tensor:
        """The whole parameter ``name``, in the checkpoint's dtype."""
        pieces = layout.pieces[name]
        dtype = self._tensor(pieces[0]).properties.dtype
        flat = torch.empty(math.prod(layout.shapes[name]), dtype=dtype)
        for piece in pieces:
            self._fill(flat[piece.start : piece.stop].view(piece.shape), piece)
        return flat.view(layout.shapes[name])

    def _fill(self, target: Tensor, piece: Piece) -> None:
        chunk = ChunkStorageMetadata(torch.Size(piece.offset), torch.Size(piece.shape))
        items = create_read_items_for_chunk_list(piece.key, self._tensor(piece), [chunk])
        if sum(math.prod(item.lengths) for item in items) != target.numel():
            raise CheckpointError(f"{self.path}: {piece.key}: some of it was never saved")
        self.reader.read_data(LoadPlan(items), _IntoTensor(target)).wait()

    def _tensor(self, piece: Piece) -> TensorStorageMetadata:
        stored = self.metadata.state_dict_metadata.get(piece.key)
        if not isinstance(stored, TensorStorageMetadata):
            raise CheckpointError(f"{self.path}: {piece.key} is missing: another model's checkpoint?")
        if tuple(stored.size) != piece.size:
            raise CheckpointError(
                f"{self.path}: {piece.key}: expected shape {piece.size}, found {tuple(stored.size)}"
            )
        return stored

    def _check_files(self) -> None:
        ends: dict[str, int] = {}
        for info in self.metadata.storage_data.values():
            ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
        for name, end in ends.items():
            file = self.path / name
            if not file.is_file():
                raise CheckpointError(f"{file}: no such file")
            if (size := file.stat().st_size) < end:
                raise CheckpointError(f"{file}: truncated: expected {end} bytes, found {size}")


class CheckpointWriter:
    """Writes a checkpoint into the empty folder ``path``; it is whole after ``finish``."""

    def __init__(self, path: Path, layout: CheckpointLayout) -> None:
        self.path, self.layout = path, layout
        self.tensors: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
        self.stored: dict[MetadataIndex, _StorageInfo] = {}
        self.files = 0
        self._open_next()

    def write(self, name: str, parameter: Tensor) -> None:
        """Add the whole parameter ``name``."""
        flat = parameter.view(-1)
        for piece in self.layout.pieces[name]:
            data = flat[piece.start : piece.stop].view(piece.shape)
            if data.numel() != flat.numel():
                data = data.clone()  # torch.save writes a view's whole storage
            chunk = ChunkStorageMetadata(torch.Size(piece.offset), torch.Size(piece.shape))
            properties = TensorProperties.create_from_tensor(data)
            empty = TensorStorageMetadata(properties, torch.Size(piece.size), [])
            self.tensors.setdefault(piece.key, empty).chunks.append(chunk)
            self._save(MetadataIndex(piece.key, chunk.offsets), data)

    def finish(self) -> None:
        for key in self.layout.objects:
            self.tensors[key] = BytesStorageMetadata()
            self._save(MetadataIndex(key), [None])  # the objects under a key, as Megatron saves them
        self.file.close()
        metadata = Metadata(state_dict_metadata=self.tensors, storage_data=self.stored)
        (self.path / ".metadata").write_bytes(pickle.dumps(metadata))
        torch.save({}, self.path / "common.pt")
        save_config(CheckpointingConfig("torch_dist"), str(self.path))
        sync_files(self.path)

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


class _IntoTensor(LoadPlanner):
    """Puts what is read into one tensor."""

    def __init__(self, target: Tensor) -> None:
        self.target = target

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        view = self.target
        for dim, (offset, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            view = view.narrow(dim, offset, length)
        return view

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None: ...

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise AssertionError("tensors only")

    def set_up_planner(self, *args: Any, **kwargs: Any) -> None: ...

    def create_local_plan(self) -> LoadPlan:
        raise AssertionError("the plan is given")

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        raise AssertionError("the plan is given")

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        raise AssertionError("the plan is given")


def _storage(tensor: Tensor) -> int:
    """Which memory a tensor or view looks at; known on the meta device too."""
    return tensor.untyped_storage()._cdata


def _piece(item: ShardedTensor) -> Piece:
    return Piece(
        start=item.data.storage_offset(),
        key=item.key,
        size=tuple(item.global_shape),
        offset=tuple(item.global_offset),
        shape=(1,) * item.prepend_axis_num + tuple(item.local_shape),
    )


def _resolve(path: Path) -> Path:
    pointer = path / "latest"
    if pointer.is_file():
        path = path / pointer.read_text(encoding="utf-8").strip()
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such folder")
    config = maybe_load_config(str(path))
    if config is None:
        raise CheckpointError(f"{path}: no metadata.json: not a Megatron checkpoint, or not a whole one")
    if config.sharded_backend != "torch_dist":
        raise CheckpointError(f"{path}: expected a torch_dist checkpoint, found {config.sharded_backend}")
    return path
