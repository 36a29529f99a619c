"""Bytes of the trainer on one GPU: weights, gradients, optimizer state, activations, what a sync sends."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from megatron_eqlen.hf.config import ModelConfig
from megatron_eqlen.hf.families import weight_map
from megatron_eqlen.plan.activations import BYTES, GPU, Activations, Kernels, activations
from megatron_eqlen.plan.parameters import Held, held
from megatron_eqlen.recipe import Recipe

MAIN_WEIGHT, MOMENTS = 4, 8
"""Bytes of a parameter's float32 main weight, and of Adam's two moments."""
PRECISION_AWARE = 6
"""Two moments in bfloat16, and the 16 bits of the main weight that the model's weight lacks."""


@dataclass(frozen=True)
class Trainer:
    """One rank of one pipeline stage."""

    weights: float
    gradients: float
    optimizer: float
    """Main weights and moments, on the GPU or on the host."""
    activations: Activations
    parameters: Held

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.optimizer + self.activations.peak


def trainer(recipe: Recipe, model: ModelConfig, kernels: Kernels = GPU) -> list[Trainer]:
    """One rank of each pipeline stage. Call ``layout.check`` first."""
    parallel, optimizer = recipe.parallel, recipe.optimizer
    sequence = parallel.tensor > 1 and parallel.sequence is not False  # on GPUs it is the default
    return [
        Trainer(
            weights=rank.elements * BYTES[recipe.model.dtype],
            gradients=rank.elements * BYTES[optimizer.grad_dtype],
            optimizer=rank.shard * optimizer_bytes(recipe),
            activations=activations(recipe, model, stage, sequence=sequence, kernels=kernels),
            parameters=rank,
        )
        for stage, rank in enumerate(held(model, parallel, recipe.world_size))
    ]


def optimizer_bytes(recipe: Recipe) -> int:
    """Of a parameter. In float32 the model's weights are the main weights."""
    if recipe.optimizer.precision == "bfloat16":
        return PRECISION_AWARE
    return MOMENTS + (MAIN_WEIGHT if recipe.model.dtype == "bfloat16" else 0)


def sent_tensors(recipe: Recipe, model: ModelConfig) -> float:
    """The two largest Hugging Face tensors, whole."""
    sizes = sorted({prod(shape) for weight in weight_map(model) for shape in weight.shapes})
    return sum(sizes[-2:]) * BYTES[recipe.model.dtype]
