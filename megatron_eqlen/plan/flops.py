"""Floating-point operations of a step, from its tokens: what a plan estimates and a run counts.

Only the model's own work is counted, so the same tokens give the same number on any machine: not what
activation checkpointing computes again, nor what the engine recomputes after it has evicted something.
"""

from __future__ import annotations

from collections.abc import Mapping

from megatron_eqlen.hf.config import ModelConfig
from megatron_eqlen.hf.cost import forward_flops
from megatron_eqlen.metrics import (
    HARVEST_BRANCHES,
    HARVEST_CONTEXT,
    HARVEST_FLOPS,
    HARVEST_GENERATED_TOKENS,
    HARVEST_PROMPT_TOKENS,
    PACKING_CONTEXT,
    PACKING_TOKENS,
    TRAIN_FLOPS,
)
from megatron_eqlen.plan.workload import Workload
from megatron_eqlen.recipe import Recipe
from megatron_eqlen.types import Metrics


def training_passes(recipe: Recipe) -> float:
    """In forward passes: forward, backward (as two), and forward for reference and old log-probs."""
    loss = recipe.loss
    return 3.0 * loss.epochs + (loss.kl_coef > 0) + (loss.minibatches * loss.epochs > 1)


def generation_flops(
    recipe: Recipe, model: ModelConfig, generated: float, context: float, prompts: float, branches: float
) -> float:
    """Of ``generated`` tokens that see ``context`` tokens, and of prefilling: ``prompts`` tokens, and of the
    prefix of each of ``branches`` forks what lies after the last whole block of the cache, half a block on
    average."""
    prefilled = prompts + branches * (recipe.rollout.block_size + 1) / 2
    return (generated + prefilled) * forward_flops(model, context)


def training_flops(recipe: Recipe, model: ModelConfig, trained: float, context: float) -> float:
    """Of ``trained`` positions that see ``context`` others."""
    return training_passes(recipe) * trained * forward_flops(model, context)


def planned_flops(recipe: Recipe, model: ModelConfig, work: Workload) -> float:
    """Of one step, estimated; prefilling is left out."""
    generation = generation_flops(recipe, model, work.generated, work.context, prompts=0.0, branches=0.0)
    return generation + training_flops(recipe, model, work.trained, work.context)


def counted(recipe: Recipe, model: ModelConfig, metrics: Mapping[str, float]) -> Metrics:
    """A step's FLOPs, from what it measured; of replayed rollouts none were generated."""

    def of(name: str) -> float:
        return metrics.get(name, 0.0)

    harvest = (
        of(HARVEST_GENERATED_TOKENS),
        of(HARVEST_CONTEXT),
        of(HARVEST_PROMPT_TOKENS),
        of(HARVEST_BRANCHES),
    )
    return {
        HARVEST_FLOPS: generation_flops(recipe, model, *harvest),
        TRAIN_FLOPS: training_flops(recipe, model, of(PACKING_TOKENS), of(PACKING_CONTEXT)),
    }
