"""Floating-point operations of a step, computed from its tokens; plans estimate and runs count with it.

Only the model's own work counts, so the same tokens give the same number on any machine: activation
recomputation and the engine's recomputation after cache evictions are excluded.
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
    """Return the training passes in units of a forward pass: forward, backward (counts as two), and forward
    passes for reference and old log-probs."""
    loss = recipe.loss
    return 3.0 * loss.epochs + (loss.kl_coef > 0) + (loss.minibatches * loss.epochs > 1)


def generation_flops(
    recipe: Recipe, model: ModelConfig, generated: float, context: float, prompts: float, branches: float
) -> float:
    """Return the FLOPs of generating ``generated`` tokens that see ``context`` tokens on average, and of
    prefilling ``prompts`` tokens and, for each of ``branches`` forks, the part of its prefix after the last
    full cache block (half a block on average)."""
    prefilled = prompts + branches * (recipe.rollout.block_size + 1) / 2
    return (generated + prefilled) * forward_flops(model, context)


def training_flops(recipe: Recipe, model: ModelConfig, trained: float, context: float) -> float:
    """Return the FLOPs of training ``trained`` positions that see ``context`` others on average."""
    return training_passes(recipe) * trained * forward_flops(model, context)


def planned_flops(recipe: Recipe, model: ModelConfig, work: Workload) -> float:
    """Return the estimated FLOPs of one step, without prefilling."""
    generation = generation_flops(recipe, model, work.generated, work.context, prompts=0.0, branches=0.0)
    return generation + training_flops(recipe, model, work.trained, work.context)


def counted(recipe: Recipe, model: ModelConfig, metrics: Mapping[str, float]) -> Metrics:
    """Return a step's FLOPs, from its metrics; replayed rollouts count no generation."""

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
