"""Policy state as Megatron's sharded state dict. With adapters it has no other weights.

The optimizer state is saved as it lies in Megatron's buckets, so no rank gathers anything. Only layouts whose
buckets hold the same weights can read it: layouts that differ in the number of data-parallel ranks.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

from megatron_eqlen.models import lora
from megatron_eqlen.models.checkpoint_folder import CheckpointError
from megatron_eqlen.models.torch_dist import BASE, LORA, check_base, sharded_weights, sharding_options
from megatron_eqlen.training.optimizer import load_state
from megatron_eqlen.training.policy import Policy


def content(policy: Policy) -> dict[str, Any]:
    """Return a checkpoint's metadata: Megatron's options, the layout that binds it, its adapters' origin."""
    return _metadata() | {"bound_to": _bucket_layout(policy), LORA: _adapters(policy), BASE: policy.base}


def of(policy: Policy) -> dict[str, Any]:
    """Return the state to save; ``policy.memory`` must be readable. Parked weights are replaced by the host's
    copies at the end, since Megatron finds the optimizer's shards by the parameters themselves."""
    state = like(policy, loading=False)
    for entry in nested_values([state[_chunk_key(policy, number)] for number in range(len(policy.chunks))]):
        if isinstance(entry, ShardedTensor | ShardedTensorFactory) and entry.data is not None:
            entry.data = policy.memory.weights.host(entry.data)
    return state


def like(policy: Policy, *, loading: bool = True) -> dict[str, Any]:
    """Return the state into which a checkpoint is loaded, or without ``loading`` the one to save."""
    metadata, adapted = _metadata(), policy.recipe.lora.rank > 0
    of_chunk = lora.sharded_state_dict if adapted else partial(sharded_weights, options=metadata)
    state: dict[str, Any] = {_chunk_key(policy, n): of_chunk(chunk) for n, chunk in enumerate(policy.chunks)}
    optimizer = policy.optimizer.sharded_state_dict(state, is_loading=loading, metadata=metadata)
    return state | {"optimizer": optimizer, "schedule": policy.schedule.state_dict()}


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
    check_base(path, saved, policy.base, policy.job.folder)
    ours, theirs = _bucket_layout(policy), saved["bound_to"]
    if different := [f"{key} {theirs[key]} (now {ours[key]})" for key in ours if ours[key] != theirs[key]]:
        raise CheckpointError(
            f"{path}: was saved with {', '.join(different)}, which binds it to that layout: resume with "
            "these values on any number of GPUs, or begin a run with model.path: the export of this one"
        )


def _adapters(policy: Policy) -> dict[str, Any] | None:
    return policy.recipe.lora.model_dump(mode="json") if policy.recipe.lora.rank else None


def _metadata() -> dict[str, Any]:
    return {
        **sharding_options(),
        "distrib_optim_sharding_type": "dp_reshardable",
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
        "bucket size": policy.ddp_chunks[0].ddp_config.bucket_size,
    }


def _chunk_key(policy: Policy, number: int) -> str:
    return "model" if len(policy.chunks) == 1 else f"model{number}"
