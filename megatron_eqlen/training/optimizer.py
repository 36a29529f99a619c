"""Megatron's distributed data parallel, distributed optimizer and learning-rate schedule around a model."""

from __future__ import annotations

import functools
from typing import Any

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

from megatron_eqlen.recipe import Recipe


def wrap(chunks: list, recipe: Recipe) -> list[DistributedDataParallel]:
    """Each model chunk in Megatron's DDP, with gradients summed (never averaged) over data-parallel ranks."""
    overlap = recipe.parallel.overlap_grad_reduce
    config = chunks[0].config
    assert config.calculate_per_token_loss, "gradients must be sums: token weights hold every factor"
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=True,
        overlap_grad_reduce=overlap,
    )
    wrapped = [
        DistributedDataParallel(config, ddp_config, chunk, disable_bucketing=number > 0)
        for number, chunk in enumerate(chunks)
    ]
    config.finalize_model_grads_func = _sum_model_grads
    if overlap:
        config.no_sync_func = _one_or_list([chunk.no_sync for chunk in wrapped])
        config.grad_sync_func = _one_or_list([chunk.start_grad_sync for chunk in wrapped])
    return wrapped


def build_optimizer(
    chunks: list[DistributedDataParallel], recipe: Recipe
) -> tuple[ChainedOptimizer, OptimizerParamScheduler]:
    """AdamW on the distributed optimizer, and the schedule that changes its learning rate once a step."""
    options = recipe.optimizer
    config = chunks[0].config
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=options.lr,
            min_lr=options.min_lr,
            adam_beta1=options.adam_beta1,
            adam_beta2=options.adam_beta2,
            adam_eps=options.adam_eps,
            weight_decay=options.weight_decay,
            clip_grad=options.clip_grad,
            bf16=recipe.model.dtype == "bfloat16",
            params_dtype=config.params_dtype,
            use_distributed_optimizer=True,
        ),
        [*chunks],
    )
    assert isinstance(optimizer, ChainedOptimizer)
    for part in optimizer.chained_optimizers:
        _init_state(part)
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
        start_wd=options.weight_decay,
        end_wd=options.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
    )
    return optimizer, schedule


def _init_state(optimizer: MegatronOptimizer) -> None:
    """Create Adam's moments as before the first update: zeros. The weights are not changed.

    They take their memory now, and Megatron can neither save nor load an optimizer that has never stepped.
    """
    assert isinstance(optimizer, DistributedOptimizer)
    groups = optimizer.optimizer.param_groups
    rates = [group["lr"] for group in groups]
    for group in groups:
        group["lr"] = 0.0  # and no weight decay
    optimizer._init_optimizer_states_with_dummy_values()
    for group, rate in zip(groups, rates, strict=True):
        group["lr"] = rate
        if "step" in group:  # Transformer Engine's Adam counts here, torch's in each state
            group["step"] = 0
    for state in optimizer.optimizer.state.values():
        if "step" in state:
            state["step"].zero_()


def gradient_norm(optimizer: ChainedOptimizer) -> float:
    """The norm of all gradients of the model, which are then ready for ``take_step``. Collective."""
    optimizer.prepare_grads()
    return float(optimizer.get_grad_norm() or 0.0)


def take_step(optimizer: ChainedOptimizer, grad_norm: float) -> None:
    """Clip the gradients to ``clip_grad`` and update the weights, on all ranks that hold them. Collective."""
    for part in optimizer.chained_optimizers:
        if part.config.clip_grad > 0 and part.get_parameters():
            clip_grad_by_total_norm_fp32([*part.get_parameters()], part.config.clip_grad, grad_norm)
    optimizer.step_with_ready_grads()


@functools.wraps(finalize_model_grads)
def _sum_model_grads(model: list, num_tokens: object = None, **kwargs: Any) -> None:
    """Megatron's gradient reduction without its division by the number of tokens."""
    finalize_model_grads(model, None, **kwargs)


def _one_or_list(functions: list) -> object:
    return functions[0] if len(functions) == 1 else functions
