"""FLOPs and throughput that a step achieved, per GPU."""

from __future__ import annotations

from collections.abc import Mapping

from megatron_eqlen.hf.config import ModelConfig
from megatron_eqlen.metrics import (
    HARVEST_FLOPS,
    HARVEST_GENERATED_TOKENS,
    HARVEST_MFU,
    HARVEST_TOKENS_PER_GPU,
    PACKING_EXPANDED_TOKENS,
    PACKING_UNIQUE_TOKENS,
    TIME_HARVEST,
    TIME_TRAIN,
    TRAIN_EXPANDED_PER_GPU,
    TRAIN_FLOPS,
    TRAIN_MFU,
    TRAIN_TOKENS_PER_GPU,
)
from megatron_eqlen.plan.flops import counted
from megatron_eqlen.plan.speed import gpu_named
from megatron_eqlen.recipe import Recipe
from megatron_eqlen.types import Metrics


def achieved(recipe: Recipe, model: ModelConfig, metrics: Mapping[str, float], device: str | None) -> Metrics:
    """Return the throughput of a step with the given ``metrics``. ``device``: the GPUs' name; None: a CPU.

    Model FLOPs utilisation divides the model's own FLOPs by the stage's time and the GPU's peak bfloat16
    rate; it is reported only for GPUs that ``plan.speed`` knows. Rates are tokens per second and GPU;
    training has two: each token of a tree once, and every side with its own copy of the prefix.
    """
    flops = counted(recipe, model, metrics)
    gpu = gpu_named(device)
    engine = recipe.gpus - recipe.world_size if recipe.rollout.engine == "server" else recipe.world_size
    found: Metrics = dict(flops)
    if (training := metrics.get(TIME_TRAIN, 0.0) * recipe.world_size) > 0:
        epochs = recipe.loss.epochs
        found[TRAIN_TOKENS_PER_GPU] = epochs * metrics.get(PACKING_UNIQUE_TOKENS, 0.0) / training
        found[TRAIN_EXPANDED_PER_GPU] = epochs * metrics.get(PACKING_EXPANDED_TOKENS, 0.0) / training
        if gpu is not None:
            found[TRAIN_MFU] = flops[TRAIN_FLOPS] / (training * gpu.flops)
    if (harvest := metrics.get(TIME_HARVEST, 0.0) * engine) > 0 and flops[HARVEST_FLOPS]:
        found[HARVEST_TOKENS_PER_GPU] = metrics.get(HARVEST_GENERATED_TOKENS, 0.0) / harvest
        if gpu is not None:
            found[HARVEST_MFU] = flops[HARVEST_FLOPS] / (harvest * gpu.flops)
    return found
