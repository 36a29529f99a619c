"""Megatron's distributed data parallel, distributed optimizer, its state and its learning-rate schedule."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import (
    ChainedOptimizer,
    MegatronOptimizer,
    OptimizerConfig,
    get_megatron_optimizer,
)
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron_eqlen.models.config import uses_transformer_engine
from megatron_eqlen.processes.cores import cores_per_rank
from megatron_eqlen.recipe import OptimizerRecipe, Recipe

HOST_OPTIONS = (
    "offload_fraction", "cpu_optimizer_cls", "gpu_optimizer_cls", "param_update_in_fp32", "pin_cpu_grads",
    "pin_cpu_params", "overlap_cpu_optimizer_d2h_h2d",
)  # fmt: skip
"""Entries that a host optimizer adds to parameter groups, some of them classes: not in checkpoints."""

IDENTITY = ("wd_mult", "is_expert_parallel")
"""Entries that tell parameter groups apart. Megatron's list includes rates, which a recipe may change."""


def wrap(chunks: list, grad_dtype: str, options: Mapping[str, Any]) -> list[DistributedDataParallel]:
    """Wrap each model chunk in Megatron's DDP, which sums gradients (never averages) over data-parallel
    ranks. ``options``: further fields of DDP's configuration."""
    config = chunks[0].config
    assert config.calculate_per_token_loss, "gradients must be sums: token weights hold every factor"
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=grad_dtype == "float32", use_distributed_optimizer=True, **options
    )
    wrapped = [
        # as Megatron has it: sums of later chunks overlap with computation without buckets
        DistributedDataParallel(config, ddp_config, chunk, disable_bucketing=number > 0)
        for number, chunk in enumerate(chunks)
    ]
    config.finalize_model_grads_func = _sum_model_grads
    if ddp_config.overlap_grad_reduce:
        # the schedule of the pipeline starts and defers the sums itself
        config.no_sync_func = _one_or_list([chunk.no_sync for chunk in wrapped])
        config.grad_sync_func = _one_or_list([chunk.start_grad_sync for chunk in wrapped])
    return wrapped


def build_optimizer(
    chunks: list[DistributedDataParallel], recipe: Recipe, fields: Mapping[str, Any]
) -> tuple[ChainedOptimizer, OptimizerParamScheduler]:
    """Return AdamW on the distributed optimizer, and its learning rate's schedule. ``fields``: further ones
    of Megatron's ``OptimizerConfig``. Raises ValueError for bfloat16 without Transformer Engine."""
    options = recipe.optimizer
    config = chunks[0].config
    if options.precision == "bfloat16" and not uses_transformer_engine():
        instead = "without them optimizer.offload: true keeps the state off the GPU"
        raise ValueError(f"optimizer.precision: bfloat16 needs a GPU and Transformer Engine; {instead}")
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=options.lr,
            min_lr=options.min_lr,
            bf16=recipe.model.dtype == "bfloat16",
            params_dtype=config.params_dtype,
            use_distributed_optimizer=True,
            **_state_options(options),
            **fields,
        ),
        [*chunks],
    )
    assert isinstance(optimizer, ChainedOptimizer)
    # one for dense weights, one for experts: no rank may train any of one kind (lora.targets: [experts])
    optimizer = ChainedOptimizer([part for part in optimizer.chained_optimizers if part.optimizer])
    with all_cores():
        for part in optimizer.chained_optimizers:
            init_state(part)
    config.grad_scale_func = optimizer.scale_loss
    updates = (recipe.steps or 0) * recipe.loss.minibatches * recipe.loss.epochs  # 0: a constant rate
    schedule = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=options.lr,
        min_lr=options.min_lr,
        lr_warmup_steps=options.warmup_steps,
        lr_decay_steps=max(updates, options.warmup_steps + 1),
        lr_decay_style=options.lr_schedule,
        start_wd=fields["weight_decay"],
        end_wd=fields["weight_decay"],
        wd_incr_steps=0,
        wd_incr_style="constant",
        # rates and their schedule are the recipe's, also after a resume
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
    )
    return optimizer, schedule


def _state_options(options: OptimizerRecipe) -> dict[str, Any]:
    """Return Megatron's options for the placement and precision of the optimizer state. Its "precision-aware"
    optimizer reads gradients where DDP has summed them, in their dtype, and keeps main weights itself. A host
    optimizer needs this, too: otherwise main weights are on the GPU as well."""
    aware = {"use_precision_aware_optimizer": True, "main_grads_dtype": getattr(torch, options.grad_dtype)}
    # nothing of the state is on the device; copies both ways overlap with the update
    if options.offload:
        return aware | {
            "optimizer_cpu_offload": True,
            "optimizer_offload_fraction": 1.0,
            "overlap_cpu_optimizer_d2h_h2d": True,
            "pin_cpu_grads": torch.cuda.is_available(),
        }
    if options.precision == "bfloat16":
        # a main weight is the bfloat16 weight and the 16 bits that it lacks of float32
        return aware | {
            "exp_avg_dtype": torch.bfloat16,
            "exp_avg_sq_dtype": torch.bfloat16,
            "main_params_dtype": torch.float32,
            "store_param_remainders": True,
        }
    return {}


def init_state(optimizer: MegatronOptimizer) -> None:
    """Create Adam's moments as before the first update: zeros, without changing the weights. They allocate
    their memory now; and Megatron can neither save nor load an optimizer that has never stepped."""
    assert isinstance(optimizer, DistributedOptimizer)
    groups = optimizer.optimizer.param_groups
    for group in groups:
        group["lr"] = 0.0  # and no weight decay; the schedule sets the rate
        for option in HOST_OPTIONS:
            group.pop(option, None)
        for parameter in group["params"]:
            if optimizer.config.use_precision_aware_optimizer:
                parameter.decoupled_grad = torch.zeros_like(parameter)
            else:
                parameter.grad = torch.zeros_like(parameter)
    optimizer.optimizer.step()
    optimizer.zero_grad()
    for group in groups:
        if "step" in group:  # Transformer Engine's Adam counts steps here, torch's in each state
            group["step"] = 0
    for state in optimizer.optimizer.state.values():
        if "step" in state:
            state["step"].zero_()


def load_state(optimizer: ChainedOptimizer, loaded: dict[str, Any]) -> None:
    """Load the optimizer's numbers and step count from a checkpoint, which may come from another kind of
    optimizer (on the host, or Transformer Engine's); other options stay those of the recipe."""
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


def gradient_norm(optimizer: ChainedOptimizer) -> float:
    """Return the norm of all gradients of the model, which are then ready for ``take_step``. Collective."""
    optimizer.prepare_grads()
    return float(optimizer.get_grad_norm() or 0.0)


def take_step(optimizer: ChainedOptimizer, grad_norm: float) -> None:
    """Clip the gradients to ``clip_grad`` and update the weights, on all ranks that hold them. Collective."""
    for part in optimizer.chained_optimizers:
        if part.config.clip_grad > 0 and part.get_parameters():
            clip_grad_by_total_norm_fp32(
                [*part.get_parameters()],
                part.config.clip_grad,
                grad_norm,
                use_decoupled_grad=part.config.use_precision_aware_optimizer,
            )
    on_host = any(part.config.optimizer_cpu_offload for part in optimizer.chained_optimizers)
    with all_cores() if on_host else nullcontext():
        optimizer.step_with_ready_grads()


@contextlib.contextmanager
def all_cores() -> Iterator[None]:
    """Let torch compute in the block with this rank's share of the machine's cores. Launchers give a rank one
    thread, which is too few for updating billions of weights on the host."""
    before = torch.get_num_threads()
    torch.set_num_threads(max(before, cores_per_rank(int(os.environ.get("LOCAL_WORLD_SIZE", "1")))))
    try:
        yield
    finally:
        torch.set_num_threads(before)


@functools.wraps(finalize_model_grads)
def _sum_model_grads(model: list, num_tokens: object = None, **kwargs: Any) -> None:
    """Reduce gradients as Megatron does, without its division by the number of tokens."""
    finalize_model_grads(model, None, **kwargs)


def _one_or_list(functions: list) -> object:
    return functions[0] if len(functions) == 1 else functions
