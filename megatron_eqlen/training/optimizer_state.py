"""State of Megatron's distributed optimizer: created before the first update, and loaded from a
checkpoint."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.optimizer import ChainedOptimizer, MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

HOST_OPTIONS = (
    "offload_fraction",
    "cpu_optimizer_cls",
    "gpu_optimizer_cls",
    "param_update_in_fp32",
    "pin_cpu_grads",
    "pin_cpu_params",
    "overlap_cpu_optimizer_d2h_h2d",
)
"""Entries that a host optimizer adds to its parameter groups; checkpoints leave them out (some are
classes)."""

IDENTITY = ("wd_mult", "is_expert_parallel")
"""Entries that tell parameter groups apart. Megatron's own list includes learning rates, so that a
recipe that changed them could not resume."""


def init_state(optimizer: MegatronOptimizer) -> None:
    """Create Adam's moments as before the first update: zeros. The weights are not changed.

    The moments allocate their memory now, and Megatron can neither save nor load an optimizer that has never
    stepped.
    """
    assert isinstance(optimizer, DistributedOptimizer)
    groups = optimizer.optimizer.param_groups
    rates = [group["lr"] for group in groups]
    for group in groups:
        group["lr"] = 0.0  # and no weight decay
        for option in HOST_OPTIONS:
            group.pop(option, None)
        for parameter in group["params"]:
            if optimizer.config.use_precision_aware_optimizer:
                parameter.decoupled_grad = torch.zeros_like(parameter)
            else:
                parameter.grad = torch.zeros_like(parameter)
    optimizer.optimizer.step()
    optimizer.zero_grad()
    for group, rate in zip(groups, rates, strict=True):
        group["lr"] = rate
        if "step" in group:  # Transformer Engine's Adam counts steps here, torch's in each state
            group["step"] = 0
    for state in optimizer.optimizer.state.values():
        if "step" in state:
            state["step"].zero_()


def load_state(optimizer: ChainedOptimizer, loaded: dict[str, Any]) -> None:
    """Load the optimizer's numbers and step count from a checkpoint.

    All other options stay those of the recipe: a checkpoint may come from another kind of optimizer (on the
    host, or Transformer Engine's) with other options.
    """
    parts = optimizer.chained_optimizers
    states = [loaded] if len(parts) == 1 else [loaded[number] for number in sorted(loaded)]
    for part, state in zip(parts, states, strict=True):
        # the checkpoint's step count with the recipe's options
        own = {_identity(group): group for group in part.param_groups}
        for group in state["optimizer"]["param_groups"]:
            step = {"step": int(group["step"])} if "step" in group else {}
            options = {key: value for key, value in own[_identity(group)].items() if key != "params"}
            group.clear()
            group.update(options | step)
    optimizer.load_state_dict(loaded)


def _identity(group: dict[str, Any]) -> tuple:
    return tuple(group.get(key) for key in IDENTITY)
