"""Hugging Face folder <-> Megatron checkpoint, on the CPU, by the code that training loads and saves with.

    hf_to_megatron(folder, out)                 a torch_dist checkpoint that loads at any parallel layout
    megatron_to_hf(checkpoint, source, out)     a folder like ``source``, with the checkpoint's weights
    megatron_to_peft(checkpoint, source, out)   a PEFT folder of the checkpoint's adapters to ``source``

The model is built whole in memory, or divided over the ranks of ``parallel``. Bits are moved, never changed:
the dtypes are those of ``source``. Only adapters are computed with: ``megatron_to_hf`` merges them into the
weights of ``source``. All functions are collective; ``out`` appears when it is complete.
"""

from __future__ import annotations

import hashlib
from contextlib import nullcontext
from functools import reduce
from math import prod
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from torch.distributed.checkpoint.metadata import Metadata

from megatron_eqlen.files import new_folder, refuse_existing
from megatron_eqlen.hf.config import read_config
from megatron_eqlen.hf.families import weight_map
from megatron_eqlen.hf.folder import DTYPES, HFFolder, check_folder, writing
from megatron_eqlen.models import checkpoint_folder, lora, torch_dist
from megatron_eqlen.models.build import build_model
from megatron_eqlen.models.checkpoint_folder import CheckpointError
from megatron_eqlen.models.names import local_parameters
from megatron_eqlen.models.policy_model import PolicyModel
from megatron_eqlen.models.weights import export_hf, load_hf, save_adapters, save_hf
from megatron_eqlen.processes.distributed import agree
from megatron_eqlen.recipe import LoraRecipe, ParallelRecipe, contents

LOGIT_TOLERANCE = 1e-4
"""Maximum difference of float32 logits, relative to the largest logit."""
ALONE = ParallelRecipe()


@torch.no_grad()
def hf_to_megatron(source: str | Path, out: str | Path, parallel: ParallelRecipe = ALONE) -> None:
    """Convert a Hugging Face folder to a checkpoint. Raises WeightsError and ConfigError."""
    out = Path(out)
    refuse_existing(out)
    folder, model = HFFolder(source), read_config(source)
    weights = check_folder(folder, model)
    # a weight may be stored in several tensors
    stored = {name: [DTYPES[folder.entries[hf].dtype] for hf in each.hf] for name, each in weights.items()}
    dtypes = {name: reduce(torch.promote_types, each) for name, each in stored.items()}
    # build in the commonest dtype and change the others, so that no bit is rounded
    chunks = build_model(model, parallel, max(dtypes.values(), key=[*dtypes.values()].count))
    for name, parameter in local_parameters(chunks).items():
        parameter.data = parameter.data.to(dtypes[name])
    load_hf(chunks, source)
    dist.barrier()  # rank 0 creates ``out`` only after every rank has checked it
    with new_folder(out) if dist.get_rank() == 0 else nullcontext() as made, writing(out):
        partial = Path(agree(lambda: str(made)))
        dist_checkpointing.save(_state(chunks), str(partial))
        if made is not None:
            names = checkpoint_folder.file_names(partial)
            checkpoint_folder.write_manifest(partial, checkpoint_folder.describe(partial, names))
    dist.barrier()


def megatron_to_hf(
    checkpoint: str | Path, source: str | Path, out: str | Path, parallel: ParallelRecipe = ALONE
) -> None:
    """Convert a checkpoint to a Hugging Face folder like ``source``, its origin, whose dtypes it has, unless
    weights were trained in a wider one. Raises CheckpointError and WeightsError."""
    refuse_existing(Path(out))
    chunks, adapters, count = _loaded(checkpoint, source, parallel)
    dtype, folder, model = next(chunks[0].parameters()).dtype, HFFolder(source), read_config(source)
    # not what a checkpoint lacks (``mtp.*``), nor a router's bias, which is float32 in any model
    entries = [folder.entries[name] for each in weight_map(model) if each.trained for name in each.hf]
    known = sum(prod(entry.shape) for entry in entries if DTYPES[entry.dtype] == dtype)
    save_hf(chunks, source, out, dtype if adapters or count > known else None)


def megatron_to_peft(
    checkpoint: str | Path, source: str | Path, out: str | Path, parallel: ParallelRecipe = ALONE
) -> None:
    """Convert adapters of the model in the folder ``source`` to a PEFT folder. Raises CheckpointError."""
    refuse_existing(Path(out))
    chunks, adapters, _ = _loaded(checkpoint, source, parallel)
    if adapters is None:
        raise CheckpointError(f"{checkpoint}: expected a checkpoint of adapters, found one of all weights")
    save_adapters(chunks, adapters, source, Path(out))


@torch.no_grad()
def verify_hash(
    checkpoint: str | Path, folder: str | Path, source: str | Path, parallel: ParallelRecipe = ALONE
) -> str:
    """Return the SHA-256 of all weights, which must be the same bits in both. ``source``: as in
    ``megatron_to_hf``. Raises CheckpointError with the first tensor that differs."""
    stored = HFFolder(folder)
    check_folder(stored, read_config(folder))
    chunks, *_ = _loaded(checkpoint, source, parallel)
    digest, different = hashlib.sha256(), None
    for name, tensor in export_hf(chunks):
        expected = stored.tensor(name)
        wide = torch.promote_types(tensor.dtype, expected.dtype)  # so that a rounded one differs
        bits, expected_bits = (t.to(wide).reshape(-1).view(torch.uint8) for t in (tensor, expected))
        if not torch.equal(bits, expected_bits):
            different = different or name  # other ranks need this one to the end
        digest.update(name.encode() + bits.numpy().tobytes())
    if different:
        raise CheckpointError(f"{folder}: {different} differs from {checkpoint}")
    return digest.hexdigest()


@torch.no_grad()
def verify_logits(checkpoint: str | Path, folder: str | Path) -> float:
    """Return the largest difference of float32 logits, relative to the largest logit, between Megatron with
    the checkpoint and Transformers with the folder. Raises CheckpointError above LOGIT_TOLERANCE."""
    from transformers import AutoModelForCausalLM

    path = check_logits_are_comparable(checkpoint)
    model = read_config(folder)
    generator = torch.Generator().manual_seed(0)
    # [1, 64] token ids -> [1, 64, V] logits, of both
    ids = torch.randint(0, model.vocab_size, (1, 64), generator=generator)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()(ids).logits
    chunks = build_model(model, ALONE, torch.float32)
    _load_weights(chunks, path)
    ours = chunks[0].eval()(ids, torch.arange(ids.shape[1])[None])
    error = float((ours - theirs).abs().max() / theirs.abs().max())
    if not error <= LOGIT_TOLERANCE:
        raise CheckpointError(f"{checkpoint}: logits differ from {folder} by {error:.1e} (relative)")
    return error


def check_logits_are_comparable(checkpoint: str | Path) -> Path:
    """Return the checkpoint's folder. Raises CheckpointError for adapters: merged weights are rounded."""
    path = torch_dist.together(lambda: torch_dist.find_checkpoint(checkpoint))
    if torch_dist.adapters_of(path, torch_dist.read_metadata(path)) is not None:
        why = "adapters are merged with rounding, so their logits are not compared"
        raise CheckpointError(f"{path}: {why}: use --verify hash")
    return path


@torch.no_grad()
def _loaded(
    checkpoint: str | Path, source: str | Path, parallel: ParallelRecipe
) -> tuple[list[PolicyModel], LoraRecipe | None, int]:
    """Return the model with the checkpoint's weights in its widest dtype, the recipe of its adapters or None,
    and how many of its numbers have that dtype."""
    check_folder(HFFolder(source), model := read_config(source))
    path = torch_dist.together(lambda: torch_dist.find_checkpoint(checkpoint))
    metadata = torch_dist.read_metadata(path)
    adapters, (dtype, count) = torch_dist.adapters_of(path, metadata), torch_dist.widest_dtype(metadata)
    chunks = build_model(model, parallel, dtype, separate_norms=adapters is not None)
    if adapters is None:
        _load_weights(chunks, path)
        return chunks, None, count
    # adapters alone are in the checkpoint: the frozen weights come from the folder
    load_hf(chunks, source)
    lora.add_adapters(chunks, adapters, seed=0)
    state = {str(number): lora.sharded_state_dict(chunk) for number, chunk in enumerate(chunks)}
    torch_dist.check_weights(path, metadata, [*state.values()])
    torch_dist.check_base(path, torch_dist.content_metadata(path), contents.weights(Path(source)), source)
    loaded = torch_dist.load_sharded(state, path)
    for number, chunk in enumerate(chunks):
        lora.load_state_dict(chunk, loaded[str(number)])
    return chunks, adapters, count


def _load_weights(chunks: list[PolicyModel], path: Path) -> None:
    stored = torch_dist.read_metadata(path)
    torch_dist.check_weights(path, stored, [*_state(chunks, stored).values()])
    loaded = torch_dist.load_sharded(_state(chunks, stored), path)
    for number, chunk in enumerate(chunks):
        chunk.load_state_dict(loaded[str(number)])


def _state(chunks: list[PolicyModel], stored: Metadata | None = None) -> dict[str, dict]:
    options = torch_dist.sharding_options()
    return {str(n): torch_dist.sharded_weights(chunk, options, stored) for n, chunk in enumerate(chunks)}
