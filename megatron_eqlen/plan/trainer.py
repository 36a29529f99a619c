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

SENT_AT_ONCE = 256 * 2**20
"""``models.weights.SENT_AT_ONCE``."""


@dataclass(frozen=True)
class Trainer:
    """One rank of one pipeline stage."""

    weights: float
    gradients: float
    optimizer: float
    """Main weights and moments, on the GPU or on the host."""
    copied_gradients: float
    """A float32 copy of bfloat16 gradients, during an update."""
    activations: Activations
    parameters: Held

    @property
    def passing(self) -> float:
        """The most that a row's passes, or an update after them, need beside what stays."""
        return max(self.activations.peak, self.copied_gradients)

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.optimizer + self.passing


def trainer(recipe: Recipe, model: ModelConfig, kernels: Kernels = GPU) -> list[Trainer]:
    """One rank of each pipeline stage. Call ``layout.check`` first."""
    parallel, optimizer = recipe.parallel, recipe.optimizer
    sequence = parallel.tensor > 1 and parallel.sequence is not False  # on GPUs it is the default
    return [
        Trainer(
            weights=rank.elements * BYTES[recipe.model.dtype],
            gradients=rank.elements * BYTES[optimizer.grad_dtype],
            optimizer=rank.shard * optimizer_bytes(recipe),
            copied_gradients=MAIN_WEIGHT * rank.shard if _copies_gradients(recipe) else 0.0,
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


def _copies_gradients(recipe: Recipe) -> bool:
    """Megatron's optimizers that hold their own main weights read gradients in any dtype."""
    optimizer = recipe.optimizer
    aware = optimizer.offload or optimizer.precision == "bfloat16"
    return optimizer.grad_dtype == "bfloat16" and not aware


def sent_tensors(recipe: Recipe, model: ModelConfig) -> float:
    """The two largest Hugging Face tensors, whole, or two messages of an export (models/weights.py)."""
    sizes = sorted({prod(shape) for weight in weight_map(model) for shape in weight.shapes})
    return max(sum(sizes[-2:]) * BYTES[recipe.model.dtype], 2 * SENT_AT_ONCE)
