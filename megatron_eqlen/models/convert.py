"""Hugging Face folder <-> Megatron checkpoint, tensor by tensor, on the CPU, in one process.

    hf_to_megatron(folder, out)                 a torch_dist checkpoint that loads at any parallel layout
    megatron_to_hf(checkpoint, source, out)     a folder like ``source``, with the checkpoint's weights
    megatron_to_peft(checkpoint, source, out)   a PEFT folder of the checkpoint's adapters to ``source``

Bits are moved, never changed: tensors keep the dtype they have in the source (``megatron_to_hf`` writes
those of ``source``). Only adapters are computed with: ``megatron_to_hf`` merges them into the weights of
``source``, as an export of their run does. ``out`` appears under its name when it is complete; only one
process at a time can make it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from megatron_eqlen.files import CheckpointError, new_folder, refuse_existing
from megatron_eqlen.hf.adapter_map import adapter_map
from megatron_eqlen.hf.config import ModelConfig, read_config
from megatron_eqlen.hf.families import weight_map
from megatron_eqlen.hf.folder import FolderWriter, HFFolder
from megatron_eqlen.hf.folder_check import check_folder, with_tied_head
from megatron_eqlen.hf.weight_map import Weight
from megatron_eqlen.models import lora
from megatron_eqlen.models.build import build_model
from megatron_eqlen.models.megatron_checkpoint import (
    CheckpointLayout,
    CheckpointReader,
    CheckpointWriter,
    checkpoint_layout,
    checkpoint_metadata,
    load_sharded,
)
from megatron_eqlen.models.weights import write_peft
from megatron_eqlen.recipe import LoraRecipe, ParallelRecipe

Progress = Callable[[int], None]
"""Callback with the number of bytes that were converted since the last call."""

LOGIT_TOLERANCE = 1e-4
"""Maximum difference of float32 logits, relative to the largest logit."""


def no_progress(nbytes: int) -> None: ...


@torch.no_grad()
def hf_to_megatron(source: str | Path, out: str | Path, progress: Progress = no_progress) -> None:
    """Convert a Hugging Face folder to a checkpoint. Raises CheckpointError (broken source, existing ``out``)
    and ConfigError; ``source`` is only read."""
    out = Path(out)
    refuse_existing(out)
    folder, model = HFFolder(source), read_config(source)
    check_folder(folder, model)
    with new_folder(out) as partial:
        writer = CheckpointWriter(partial, checkpoint_layout(model))
        for weight in weight_map(model):
            merged = weight.arrangement.merge([folder.tensor(name) for name in weight.hf])
            writer.write(weight.megatron, merged)
            progress(merged.nbytes)
        writer.finish()


@torch.no_grad()
def megatron_to_hf(
    checkpoint: str | Path, source: str | Path, out: str | Path, progress: Progress = no_progress
) -> None:
    """Convert a checkpoint to a Hugging Face folder. ``source``: the folder that the checkpoint's model came
    from. Raises CheckpointError."""
    refuse_existing(Path(out))
    folder, model = HFFolder(source), read_config(source)
    check_folder(folder, model)
    tensors = _hf_tensors(CheckpointReader(checkpoint), model, folder)
    with new_folder(Path(out)) as partial:
        writer = FolderWriter(partial, folder)
        for name, tensor in with_tied_head(tensors, model, folder):
            writer.write(name, tensor)
            progress(tensor.nbytes)
        writer.finish()


def megatron_to_peft(checkpoint: str | Path, source: str | Path, out: str | Path) -> None:
    """Convert a checkpoint of adapters to a PEFT folder. ``source``: folder of the model that they were
    trained on. Raises CheckpointError."""
    refuse_existing(Path(out))
    reader = CheckpointReader(checkpoint)
    if reader.lora is None:
        raise CheckpointError(f"{reader.path}: expected a checkpoint of adapters, found one of all weights")
    adapters = _Adapters(reader, reader.lora, read_config(source))
    tensors = {name: adapters.tensor(name) for name in adapters.layout.pieces}
    write_peft(Path(out), adapters.which, reader.lora, source, tensors)


def converted_bytes(source: str | Path) -> int:
    """Return the total number of bytes that ``progress`` will report, from the folder's dtypes."""
    folder, model = HFFolder(source), read_config(source)
    check_folder(folder, model)
    return sum(folder.entries[name].nbytes for weight in weight_map(model) for name in weight.hf)


@torch.no_grad()
def verify_hash(
    checkpoint: str | Path, folder: str | Path, source: str | Path, progress: Progress = no_progress
) -> str:
    """Return the SHA-256 of all weights, which must be the same bits in both. ``source``: as in
    ``megatron_to_hf``. Raises CheckpointError with the first tensor that differs."""
    stored, model = HFFolder(folder), read_config(folder)
    check_folder(stored, model)
    tensors = _hf_tensors(CheckpointReader(checkpoint), model, HFFolder(source))
    digest = hashlib.sha256()
    for name, tensor in tensors:
        expected = stored.tensor(name)
        bits, expected_bits = _bits(tensor.to(expected.dtype)), _bits(expected)
        if not torch.equal(bits, expected_bits):
            raise CheckpointError(f"{folder}: {name} differs from {checkpoint}")
        digest.update(name.encode() + bits.numpy().tobytes())
        progress(tensor.nbytes)
    return digest.hexdigest()


@torch.no_grad()
def verify_logits(checkpoint: str | Path, folder: str | Path) -> float:
    """Return the largest difference of float32 logits, relative to the largest logit, between Megatron with
    the checkpoint and Transformers with the folder. Both models must fit in memory. Raises CheckpointError
    above LOGIT_TOLERANCE."""
    from transformers import AutoModelForCausalLM

    path = check_logits_are_comparable(checkpoint)
    model = read_config(folder)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, model.vocab_size, (1, 64), generator=generator)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()(ids).logits
    ours = _megatron_logits(path, model, ids)
    error = float((ours - theirs).abs().max() / theirs.abs().max())
    if not error <= LOGIT_TOLERANCE:
        raise CheckpointError(f"{checkpoint}: logits differ from {folder} by {error:.1e} (relative)")
    return error


def check_logits_are_comparable(checkpoint: str | Path) -> Path:
    """Return the checkpoint's folder. Raises CheckpointError for adapters, whose merged weights are
    rounded."""
    reader = CheckpointReader(checkpoint)
    if reader.lora is not None:
        raise CheckpointError(
            f"{reader.path}: adapters are merged with rounding, so their logits are not compared: use "
            "--verify hash"
        )
    return reader.path


def _megatron_logits(checkpoint: Path, model: ModelConfig, ids: Tensor) -> Tensor:
    (chunk,) = build_model(model, ParallelRecipe(), torch.float32)
    state = {"model": chunk.sharded_state_dict(metadata=checkpoint_metadata())}
    chunk.load_state_dict(load_sharded(state, checkpoint)["model"])
    return chunk.eval()(ids, torch.arange(ids.shape[1])[None])


def _hf_tensors(reader: CheckpointReader, model: ModelConfig, base: HFFolder) -> Iterator[tuple[str, Tensor]]:
    """Return the weights of a checkpoint; adapters are merged into those of ``base``. Raises CheckpointError
    before the first if the checkpoint is another model's."""
    if reader.lora is not None:
        return _merged_tensors(_Adapters(reader, reader.lora, model), model, base)
    layout = checkpoint_layout(model)
    reader.check(layout)
    return _stored_tensors(reader, layout, model)


def _stored_tensors(
    reader: CheckpointReader, layout: CheckpointLayout, model: ModelConfig
) -> Iterator[tuple[str, Tensor]]:
    for weight in weight_map(model):
        parts = weight.arrangement.split(reader.parameter(layout, weight.megatron))
        yield from zip(weight.hf, parts, strict=True)


class _Adapters:
    """Adapters in a checkpoint. Raises CheckpointError if they are another model's."""

    def __init__(self, reader: CheckpointReader, recipe: LoraRecipe, model: ModelConfig) -> None:
        self.reader, self.recipe = reader, recipe
        self.which = adapter_map(model, recipe.rank, recipe.targets)
        self.layout = lora.checkpoint_layout(self.which)
        reader.check(self.layout)

    def tensor(self, name: str) -> Tensor:
        """Return a matrix by its name in ``hf``."""
        return self.reader.parameter(self.layout, name)

    def matrix(self, weight: Weight) -> Tensor:
        """Return a matrix as Megatron arranges it."""
        return weight.arrangement.merge([self.tensor(name) for name in weight.hf])


def _merged_tensors(adapters: _Adapters, model: ModelConfig, base: HFFolder) -> Iterator[tuple[str, Tensor]]:
    """Yield all weights, with adapters merged, in the dtype in which they were trained."""
    of_weight = {each.base.megatron: each for each in adapters.which}
    scale = adapters.recipe.alpha / adapters.recipe.rank
    dtype = adapters.matrix(adapters.which[0].A).dtype
    for weight in weight_map(model):
        parts = [base.tensor(name).to(dtype) for name in weight.hf]
        if (adapter := of_weight.get(weight.megatron)) is not None:
            A, B = adapters.matrix(adapter.A), adapters.matrix(adapter.B)
            whole = lora.merged(weight.arrangement.merge(parts), A, B, scale)
            parts = weight.arrangement.split(whole)
        yield from zip(weight.hf, parts, strict=True)


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)
