"""Read Megatron's ``torch_dist`` checkpoints, those of other software included. A checkpoint is checked, and
refused by name, before Megatron loads anything of it; and its ``.metadata``, a pickle, cannot run code."""

from __future__ import annotations

import io
import logging
import pickle
import re
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing import dict_utils
from megatron.core.dist_checkpointing import gpt_checkpoint_interop as gpt
from megatron.core.dist_checkpointing.core import maybe_load_config
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, apply_factories
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, TensorStorageMetadata

from megatron_eqlen.files import opened
from megatron_eqlen.hf.folder import WEIGHT_DTYPES, first_few
from megatron_eqlen.models import checkpoint_folder
from megatron_eqlen.models.checkpoint_folder import CheckpointError
from megatron_eqlen.models.policy_model import PolicyModel
from megatron_eqlen.processes.distributed import agree, gather
from megatron_eqlen.recipe import LoraRecipe

logger = logging.getLogger(__name__)

UNREADABLE = (
    OSError, EOFError, pickle.UnpicklingError, AttributeError, ImportError, IndexError, KeyError, TypeError,
    ValueError, RuntimeError,
)  # fmt: skip
"""Errors that unpickling raises for damaged bytes (docs.python.org/3/library/pickle.html)."""

ANOTHER = "another model's checkpoint, or an earlier version's? Then begin with its export"
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
BASE = "base"
"""Key of the digests of the files of weights that adapters were trained on; missing in older checkpoints."""

# `optimizer.distributed.dp_group_idx_0.param_state`, `chained_0.optimizer.state.exp_avg...`
OPTIMIZER = re.compile(r"(chained_\d+\.)?optimizer\.")
"""Prefix of keys that do not belong to the model."""

# `decoder.layers.3.mlp.linear_fc1.adapter.A.0`
ADAPTER = re.compile(r"\.adapter\.[AB]\.\d+$")
"""End of keys of adapters' matrices."""


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
        with opened(file) as index:
            metadata = _MetadataUnpickler(index).load()
    except CheckpointError as error:
        raise CheckpointError(f"{file}: {error}") from None
    except UNREADABLE as error:
        raise CheckpointError(f"{file}: cannot be read: {error!r}") from None
    if not isinstance(metadata, Metadata):
        raise CheckpointError(f"{file}: cannot be read: expected Metadata, found {type(metadata).__name__}")
    return metadata


def check_objects(path: Path) -> None:
    """Raise CheckpointError for an object of more than plain data and tensors, which might run code."""
    metadata = read_metadata(path)
    for index, stored in metadata.storage_data.items():
        kind = metadata.state_dict_metadata.get(index.fqn)
        # tensors hold no code
        if not isinstance(kind, BytesStorageMetadata) or "_extra_state" in index.fqn:
            continue
        file = path / stored.relative_path
        try:
            with opened(file) as objects:
                objects.seek(stored.offset)
                content = io.BytesIO(objects.read(stored.length))
            torch.load(content, map_location="cpu", weights_only=True)
        except UNREADABLE as error:
            raise CheckpointError(f"{file}: {index.fqn}: is no plain data: {error}") from None


def find_checkpoint(path: str | Path) -> Path:
    """Return the folder of a whole checkpoint. ``path``: a checkpoint, or a folder with a ``latest`` file.
    Raises CheckpointError. The bytes of other software's, without a manifest, are not checked: a warning."""
    path = _resolve(Path(path))
    if (path / checkpoint_folder.MANIFEST).exists():
        checkpoint_folder.verify(path)
    else:
        logger.warning("%s: no %s: its bytes are not checked", path, checkpoint_folder.MANIFEST)
    _check_files(path, read_metadata(path))
    return path


def together[Found](find: Callable[[], Found]) -> Found:
    """Return rank 0's result of ``find`` on every rank, or raise its CheckpointError there. Collective."""

    def found() -> Found | CheckpointError:
        try:
            return find()
        except CheckpointError as error:
            return error

    if isinstance(answer := agree(found), CheckpointError):
        raise answer
    return answer


def content_metadata(path: Path) -> dict[str, Any]:
    """Return ``training.sharded_state.content``; {} for other software's. Raises CheckpointError."""
    check_objects(path)  # Megatron reads them again, with plain unpicklers
    return dist_checkpointing.load_content_metadata(str(path)) or {}


def adapters_of(path: Path, metadata: Metadata) -> LoraRecipe | None:
    """Return the recipe of the adapters that a checkpoint holds in place of all weights; None without."""
    if not any(ADAPTER.search(key) for key in metadata.state_dict_metadata):
        return None
    content = content_metadata(path)
    if LORA not in content:
        raise CheckpointError(f"{path}: has adapters, but not their recipe: another software's checkpoint?")
    return LoraRecipe.model_validate(content[LORA])


def check_base(path: Path, content: Mapping, found: Mapping[str, str] | None, source: str | Path) -> None:
    """Raise CheckpointError if adapters were trained on other weights than ``found``, those of ``source``."""
    if (expected := content.get(BASE)) and expected != found:
        raise CheckpointError(f"{path}: expected the model that its adapters were trained on, found {source}")


def widest_dtype(metadata: Metadata) -> tuple[torch.dtype, int]:
    """Return a dtype that holds every weight of a checkpoint unrounded, and how many numbers have it."""
    # a router's bias is not trained, and float32 in any model
    weights = [stored for key, stored in _weights(metadata).items() if not key.endswith("expert_bias")]
    dtype = reduce(torch.promote_types, [each.properties.dtype for each in weights] or [torch.float32])
    dtype = dtype if dtype.is_floating_point else torch.float32
    return dtype, sum(each.size.numel() for each in weights if each.properties.dtype == dtype)


def _weights(metadata: Metadata) -> dict[str, TensorStorageMetadata]:
    """Return the model's own tensors: an optimizer's state is no part of it."""
    return {
        key: stored
        for key, stored in metadata.state_dict_metadata.items()
        if isinstance(stored, TensorStorageMetadata) and not OPTIMIZER.match(key)
    }


def check_weights(path: Path, metadata: Metadata, states: Sequence[dict[str, Any]]) -> None:
    """Raise CheckpointError unless the checkpoint holds exactly the tensors of the ranks' sharded state
    dicts, in their shapes, as floating-point numbers. ``states``: of this rank's chunks. Collective."""
    parts = []
    for state in states:
        # factories are replaced, in place, by the tensors that they make of a weight
        copied = dict(state)
        apply_factories(copied)
        parts += [item for item in dict_utils.nested_values(copied) if isinstance(item, ShardedTensor)]
    shapes = {part.key: tuple(part.global_shape) for part in parts}
    if faults := gather([fault for key, shape in shapes.items() if (fault := _fault(metadata, key, shape))]):
        raise CheckpointError(f"{path}: {faults[0]}")
    if unknown := _weights(metadata).keys() - {*gather([*shapes])}:
        raise CheckpointError(f"{path}: the model lacks {first_few(unknown)}: another model's checkpoint?")


def sharded_weights(chunk: PolicyModel, options: dict, stored: Metadata | None = None) -> dict[str, Any]:
    """Return a chunk's sharded state dict. ``stored``: index of the checkpoint to fill it, perhaps of a
    GPTModel: its layer n has the weights of our layers 2n and 2n + 1; equal layers share tensors [n, ...]."""
    state = chunk.sharded_state_dict(metadata=options)
    keys = stored.state_dict_metadata if stored else {}
    # `decoder.layers.mlp.linear_fc1.weight` [layers, ...]: no number, so all layers are in one tensor
    if any(re.match(r"decoder\.layers\.\D", key) for key in keys):
        # Megatron's own maps refuse Gated DeltaNet and two kinds of MLP (gpt_checkpoint_interop.py:129-142).
        numbers = {layer: layer // 2 for layer in range(chunk.config.num_layers)}
        maps = gpt.GPTCompatLayerMaps(numbers, {}, frozenset(), len(numbers) // 2)
        gpt.retarget_sharded_state_dict_to_gpt_checkpoint(state, maps)
    # `decoder.layers.7.mlp...`: a GPTModel's numbers and the name of its final norm
    elif "decoder.final_layernorm.weight" in keys:
        for entry in dict_utils.nested_values(state):
            key = entry.key.replace("decoder.final_norm.", "decoder.final_layernorm.")
            entry.key = re.sub(r"(?<=decoder\.layers\.)\d+", lambda layer: str(int(layer[0]) // 2), key)
    return state


def load_sharded(state: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return ``state``, a sharded state dict, filled from the checkpoint ``path`` by Megatron. Collective.
    Raises CheckpointError for an index or an object that cannot be read or might run code, and for missing
    tensors. Modules' extra states are None: they are Transformer Engine's fp8 state, not used here."""
    together(lambda: check_objects(path))
    extra, kept = dict_utils.extract_matching_values(
        state, lambda item: isinstance(item, ShardedObject) and item.key.endswith("_extra_state")
    )
    assert isinstance(kept, dict)  # as ``state`` is
    dict_utils.dict_list_map_inplace(lambda _: None, extra)
    wanted = {item.key for item in dict_utils.nested_values(kept) if isinstance(item, ShardedTensor)}
    if missing := gather([*(wanted - read_metadata(path).state_dict_metadata.keys())]):
        raise CheckpointError(f"{path}: lacks {first_few({*missing})}: {ANOTHER}")
    loaded = dist_checkpointing.load(kept, str(path))
    assert isinstance(loaded, dict)  # a tuple only if mismatched keys are requested
    dict_utils.merge(loaded, extra)
    return loaded


def sharding_options() -> dict[str, Any]:
    """Return the metadata of sharded state dicts: one tensor per weight, for every layout."""
    return {
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        "singleton_local_shards": False,
    }


def _fault(metadata: Metadata, key: str, shape: tuple[int, ...]) -> str | None:
    stored = metadata.state_dict_metadata.get(key)
    if not isinstance(stored, TensorStorageMetadata):
        return f"lacks {key}: {ANOTHER}"
    if tuple(stored.size) != shape:
        return f"{key}: expected shape {shape}, found {tuple(stored.size)}"
    if (dtype := stored.properties.dtype) not in WEIGHT_DTYPES:
        return f"{key}: {dtype} is not a weight's dtype"
    return None


def _check_files(path: Path, metadata: Metadata) -> None:
    ends: dict[str, int] = {}
    try:
        for info in metadata.storage_data.values():
            ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
    except UNREADABLE as error:
        raise CheckpointError(f"{path / METADATA}: cannot be read: {error!r}") from None
    for name, end in ends.items():
        file = path / name
        if not file.is_file():
            raise CheckpointError(f"{file}: no such file")
        if (size := file.stat().st_size) < end:
            raise CheckpointError(f"{file}: truncated: expected {end} bytes, found {size}")


def _resolve(path: Path) -> Path:
    path = checkpoint_folder.latest(path) or path
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such folder")
    try:
        config = maybe_load_config(str(path))
    except UNREADABLE as error:
        raise CheckpointError(f"{path / 'metadata.json'}: cannot be read: {error!r}") from None
    # Megatron's metadata.json names the format; without it torch's loader would fail in its own words
    if config is None:
        raise CheckpointError(f"{path}: no metadata.json: not a Megatron checkpoint, or an incomplete one")
    if config.sharded_backend != "torch_dist":
        found = f"expected a torch_dist checkpoint, found {config.sharded_backend!r}"
        raise CheckpointError(f"{path / 'metadata.json'}: {found}")
    return path
