"""Hugging Face folder <-> Megatron checkpoint, tensor by tensor, on the CPU, in one process.

    hf_to_megatron(folder, out)                 a torch_dist checkpoint that loads at any parallel layout
    megatron_to_hf(checkpoint, source, out)     a folder like ``source``, with the checkpoint's weights

Bits are moved, never changed: tensors keep the dtype they have in the source (``megatron_to_hf`` writes
those of ``source``). ``out`` appears under its name when it is complete; only one process at a time can make
it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from megatron_eqlen.files import CheckpointError, new_folder, refuse_existing
from megatron_eqlen.hf.config import ModelConfig, read_config
from megatron_eqlen.hf.families import weight_map
from megatron_eqlen.hf.folder import FolderWriter, HFFolder
from megatron_eqlen.hf.folder_check import check_folder, with_tied_head
from megatron_eqlen.models.build import build_model
from megatron_eqlen.models.megatron_checkpoint import (
    CheckpointLayout,
    CheckpointReader,
    CheckpointWriter,
    checkpoint_layout,
    checkpoint_metadata,
    load_sharded,
)
from megatron_eqlen.recipe import ParallelRecipe

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
    reader, layout = CheckpointReader(checkpoint), checkpoint_layout(model)
    reader.check(layout)
    with new_folder(Path(out)) as partial:
        writer = FolderWriter(partial, folder)
        for name, tensor in with_tied_head(_hf_tensors(reader, layout, model), model, folder):
            writer.write(name, tensor)
            progress(tensor.nbytes)
        writer.finish()


def converted_bytes(source: str | Path) -> int:
    """Return the total number of bytes that ``progress`` will report, from the folder's dtypes."""
    folder, model = HFFolder(source), read_config(source)
    check_folder(folder, model)
    return sum(folder.entries[name].nbytes for weight in weight_map(model) for name in weight.hf)


@torch.no_grad()
def verify_hash(checkpoint: str | Path, folder: str | Path, progress: Progress = no_progress) -> str:
    """Return the SHA-256 of all weights, which must be the same bits in both. Raises CheckpointError with the
    first tensor that differs."""
    stored, model = HFFolder(folder), read_config(folder)
    check_folder(stored, model)
    reader, layout = CheckpointReader(checkpoint), checkpoint_layout(model)
    reader.check(layout)
    digest = hashlib.sha256()
    for name, tensor in _hf_tensors(reader, layout, model):
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

    model = read_config(folder)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, model.vocab_size, (1, 64), generator=generator)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()(ids).logits
    ours = _megatron_logits(CheckpointReader(checkpoint).path, model, ids)
    error = float((ours - theirs).abs().max() / theirs.abs().max())
    if not error <= LOGIT_TOLERANCE:
        raise CheckpointError(f"{checkpoint}: logits differ from {folder} by {error:.1e} (relative)")
    return error


def _megatron_logits(checkpoint: Path, model: ModelConfig, ids: Tensor) -> Tensor:
    (chunk,) = build_model(model, ParallelRecipe(), torch.float32)
    state = {"model": chunk.sharded_state_dict(metadata=checkpoint_metadata())}
    chunk.load_state_dict(load_sharded(state, checkpoint)["model"])
    return chunk.eval()(ids, torch.arange(ids.shape[1])[None])


def _hf_tensors(
    reader: CheckpointReader, layout: CheckpointLayout, model: ModelConfig
) -> Iterator[tuple[str, Tensor]]:
    for weight in weight_map(model):
        parts = weight.arrangement.split(reader.parameter(layout, weight.megatron))
        yield from zip(weight.hf, parts, strict=True)


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)
