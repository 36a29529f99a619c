"""Bytes of the trainer on one GPU: weights, gradients, optimizer state, activations, tensors sent in a
sync."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import prod

from megatron_eqlen.hf.adapter_map import adapter_map
from megatron_eqlen.hf.config import ModelConfig
from megatron_eqlen.hf.families import weight_map
from megatron_eqlen.job import Job
from megatron_eqlen.plan.activations import BYTES, Activations, activations
from megatron_eqlen.plan.parameters import RankBuffers, rank_buffers
from megatron_eqlen.recipe import OptimizerRecipe, Recipe

MAIN_WEIGHT, MOMENTS = 4, 8
"""Bytes of a parameter's float32 main weight, and of Adam's two moments."""
PRECISION_AWARE = 6
"""Bytes of two bfloat16 moments, and of the 16 bits of the main weight that the model's weight lacks."""

SENT_AT_ONCE = 256 * 2**20
"""``models.weights.SENT_AT_ONCE``."""


@dataclass(frozen=True)
class Trainer:
    """Memory of one rank of one pipeline stage, in bytes."""

    weights: float
    gradients: float
    optimizer: float
    """Main weights and moments, on the GPU or on the host."""
    copied_gradients: float
    """Float32 copy of bfloat16 gradients during an update."""
    activations: Activations
    parameters: RankBuffers

    @property
    def passing(self) -> float:
        """Temporary memory: the maximum over a row's passes and the update."""
        return max(self.activations.peak, self.copied_gradients)

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.optimizer + self.passing


def trainer(job: Job) -> list[Trainer]:
    """Return the memory of one rank of each pipeline stage. Call ``check_layout`` first."""
    recipe, model = job.recipe, job.model
    parallel, optimizer = recipe.parallel, recipe.optimizer
    sequence = parallel.tensor > 1 and parallel.sequence is not False  # the default on GPUs
    return [
        Trainer(
            weights=(rank.elements + sum(rank.frozen)) * BYTES[recipe.model.dtype],
            gradients=rank.elements * BYTES[optimizer.grad_dtype],
            optimizer=rank.shard * optimizer_bytes(recipe),
            copied_gradients=MAIN_WEIGHT * rank.shard if _copies_gradients(optimizer) else 0.0,
            activations=activations(job, stage, sequence=sequence),
            parameters=rank,
        )
        for stage, rank in enumerate(rank_buffers(model, parallel, recipe.world_size, recipe.lora))
    ]


def teacher(job: Job) -> Trainer:
    """Return the memory of one rank of the teacher's largest stage, as if it were trained."""
    assert job.teacher is not None
    return max(trainer(job.teacher), key=lambda stage: stage.weights)


def optimizer_bytes(recipe: Recipe) -> int:
    """Return the bytes of optimizer state per parameter. In float32 the model's weights are the main
    weights."""
    if recipe.optimizer.precision == "bfloat16":
        return PRECISION_AWARE
    return MOMENTS + (MAIN_WEIGHT if recipe.model.dtype == "bfloat16" else 0)


def _copies_gradients(optimizer: OptimizerRecipe) -> bool:
    """Return True if an update copies gradients. Megatron's optimizers with their own main weights read any
    dtype."""
    aware = optimizer.offload or optimizer.precision == "bfloat16"
    return optimizer.grad_dtype == "bfloat16" and not aware


def sent_tensors(job: Job) -> float:
    """Return the bytes of the two largest Hugging Face tensors, or of two messages of an export
    (models/weights.py)."""
    sent = max(_two_largest(job.model) * BYTES[job.recipe.model.dtype], 2 * SENT_AT_ONCE)
    return sent + (merging_bytes(job) if job.recipe.lora.rank else 0.0)


def merging_bytes(job: Job) -> float:
    """Return the bytes of a message's merged weights, and of the largest of them in float32
    (``models.lora.merged``)."""
    recipe = job.recipe
    adapters = adapter_map(job.model, recipe.lora.rank, recipe.lora.targets)
    largest = max(sum(map(prod, adapter.base.shapes)) for adapter in adapters) / recipe.parallel.tensor
    return max(SENT_AT_ONCE, largest * BYTES[recipe.model.dtype]) + MAIN_WEIGHT * largest


@cache
def _two_largest(model: ModelConfig) -> int:
    return sum(sorted({prod(shape) for weight in weight_map(model) for shape in weight.shapes})[-2:])
