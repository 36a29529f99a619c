"""Policy state as Megatron's sharded state dict, in one of the two layouts of ``checkpoint.resharding``.
With adapters it has no other weights.

``data_parallel``: the optimizer state as it lies in Megatron's buckets. No rank gathers anything. Only
layouts whose buckets hold the same weights can read it: layouts that differ in the number of data-parallel
ranks. ``any``: as tensors of the model. The first data-parallel rank gathers the state in host memory.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from torch.distributed.checkpoint.metadata import Metadata

from megatron_eqlen.files import CheckpointError
from megatron_eqlen.models import lora
from megatron_eqlen.models.megatron_checkpoint import (
    LORA,
    checkpoint_metadata,
    read_metadata,
    sharded_weights,
)
from megatron_eqlen.processes.distributed import gather
from megatron_eqlen.training.optimizer import load_state
from megatron_eqlen.training.policy import Policy

SHARDING = {"data_parallel": "dp_reshardable", "any": "fully_reshardable"}
"""``checkpoint.resharding`` -> Megatron's name."""


def content(policy: Policy) -> dict[str, Any]:
    """Return a checkpoint's metadata: Megatron's options, the layout that binds it, its adapters' recipe."""
    resharding = policy.recipe.checkpoint.resharding
    own = {"bound_to": _bucket_layout(policy), LORA: _adapters(policy)}
    return _metadata(SHARDING[resharding]) | own


def of(policy: Policy) -> dict[str, Any]:
    """Return the state to save; ``policy.memory`` must be readable. Parked weights are replaced by the host's
    copies at the end, since Megatron finds the optimizer's shards by the parameters themselves."""
    state = _build(policy, SHARDING[policy.recipe.checkpoint.resharding])
    for number in range(len(policy.chunks)):
        for entry in nested_values(state[_chunk_key(policy, number)]):
            if isinstance(entry, ShardedTensor | ShardedTensorFactory) and entry.data is not None:
                entry.data = policy.memory.weights.host(entry.data)
    return state


def like(path: Path, saved: dict[str, Any], policy: Policy) -> dict[str, Any]:
    """Return the state into which the checkpoint ``path`` is loaded. ``saved``: its ``content``."""
    return _build(policy, saved["distrib_optim_sharding_type"], read_metadata(path))


def load(policy: Policy, state: dict[str, Any]) -> None:
    """Load a state dict that Megatron has filled into the policy."""
    for number, chunk in enumerate(policy.chunks):
        load_weights = (
            partial(lora.load_state_dict, chunk) if policy.recipe.lora.rank else chunk.load_state_dict
        )
        load_weights(state[_chunk_key(policy, number)])
    load_state(policy.optimizer, state["optimizer"])
    policy.schedule.num_steps = 0  # Megatron adds what it loads
    policy.schedule.load_state_dict(state["schedule"])


def check_content(path: Path, saved: dict[str, Any], policy: Policy) -> None:
    """Raise CheckpointError if ``path`` (its content: ``saved``) has other adapters or another layout."""
    both = _adapters(policy), saved[LORA]
    if both[0] != both[1]:
        expected, found = (
            ", ".join(f"lora.{key} {value}" for key, value in (each or {"rank": 0}).items()) for each in both
        )
        raise CheckpointError(f"{path}: expected {expected}, as in the recipe, found {found}")
    # a checkpoint of whole tensors fits any layout
    if saved["distrib_optim_sharding_type"] != SHARDING["data_parallel"]:
        return
    ours, theirs = _bucket_layout(policy), saved["bound_to"]
    different = [f"{key} {theirs[key]} (now {ours[key]})" for key in ours if ours[key] != theirs[key]]
    if different:
        raise CheckpointError(
            f"{path}: was saved with {', '.join(different)} and checkpoint.resharding: data_parallel, "
            f"which binds it to that layout. To change the layout: resume once in the old layout with "
            f"checkpoint.resharding=any, touch STOP in the run folder, resume in the new layout"
        )


def _build(policy: Policy, sharding: str, stored: Metadata | None = None) -> dict[str, Any]:
    """``stored``: index of the checkpoint that the state is loaded from."""
    metadata, adapted = _metadata(sharding), policy.recipe.lora.rank > 0
    state: dict[str, Any] = {
        _chunk_key(policy, number): (
            lora.sharded_state_dict(chunk) if adapted else sharded_weights(chunk, metadata, stored)
        )
        for number, chunk in enumerate(policy.chunks)
    }
    loading = stored is not None
    optimizer = policy.optimizer.sharded_state_dict(state, is_loading=loading, metadata=metadata)
    parts = [optimizer] if "optimizer" in optimizer else [*optimizer.values()]
    if sharding == SHARDING["any"]:  # rank 0 writes the step for all, also if it has no weights to be trained
        options = [group for part in parts for group in part["optimizer"]["param_groups"]]
        step = max(gather([group.get("step", 0) for group in options]))
        for group in options:
            group["step"] = step
    for part in parts:
        if part["param_state"] is None:  # another rank gathered it
            del part["param_state"]
    state["optimizer"] = optimizer
    state["schedule"] = policy.schedule.state_dict()
    return state


def _adapters(policy: Policy) -> dict[str, Any] | None:
    return policy.recipe.lora.model_dump(mode="json") if policy.recipe.lora.rank else None


def _metadata(sharding: str) -> dict[str, Any]:
    return {
        **checkpoint_metadata(),
        "distrib_optim_sharding_type": sharding,
        "distrib_optim_fully_reshardable_mem_efficient": True,  # on the host, by one rank
        "chained_optim_avoid_prefix": True,
    }


def _bucket_layout(policy: Policy) -> dict[str, Any]:
    """Return everything that decides which weights lie in which of Megatron's buckets, and where."""
    recipe = policy.recipe
    keys = ("tensor", "pipeline", "virtual_pipeline", "layers_per_stage", "expert", "expert_tensor")
    return {
        **{f"parallel.{key}": getattr(recipe.parallel, key) for key in keys},
        "model.dtype": recipe.model.dtype,
        "optimizer.grad_dtype": recipe.optimizer.grad_dtype,
        "bucket size": policy.model[0].ddp_config.bucket_size,
    }


def _chunk_key(policy: Policy, number: int) -> str:
    return "model" if len(policy.chunks) == 1 else f"model{number}"
