"""Bytes of the trainer on one GPU: weights, gradients, optimizer state, activations, sent tensors.

Megatron's DDP puts a model chunk's weights into one buffer and their gradients into another; experts have
their own, with other data-parallel groups. With the distributed optimizer each rank of a group owns an equal
part of every buffer. Padding between parameters, at most 63 elements each and some hundreds a bucket
(megatron/core/distributed/param_and_grad_buffer.py), is not counted. With adapters only they are in buffers:
the model's own weights are frozen and lie alone.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from math import prod

from megatron_eqlen.hf.adapter_map import adapter_map
from megatron_eqlen.hf.config import ModelConfig
from megatron_eqlen.hf.families import weight_map
from megatron_eqlen.hf.weight_map import Weight
from megatron_eqlen.job import Job
from megatron_eqlen.plan.activations import BYTES, Activations, activations
from megatron_eqlen.recipe import LoraRecipe, ParallelRecipe, Recipe, layout

MAIN_WEIGHT, MOMENTS = 4, 8
"""Bytes of a parameter's float32 main weight, and of Adam's two moments."""
PRECISION_AWARE = 6
"""Bytes of two bfloat16 moments, and of the 16 bits of the main weight that the model's weight lacks."""

SENT_AT_ONCE = 256 * 2**20
"""``models.weights.SENT_AT_ONCE``."""


@dataclass(frozen=True)
class Buffer:
    """One of Megatron's parameter buffers, as one rank holds it."""

    sizes: tuple[int, ...]
    """Elements of each parameter."""
    ranks: int
    """Size of the data-parallel group that shares the optimizer state."""

    @property
    def elements(self) -> int:
        """Elements of the weight buffer; the gradient buffer is as large."""
        return sum(self.sizes)

    @property
    def shard(self) -> int:
        """Number of parameters that one rank of the group updates."""
        return -(-self.elements // self.ranks)


@dataclass(frozen=True)
class RankBuffers:
    """Buffers that a rank of one pipeline stage holds for the lifetime of the policy."""

    buffers: tuple[Buffer, ...]
    frozen: tuple[int, ...] = ()
    """Elements of each frozen parameter."""

    @property
    def elements(self) -> int:
        """Elements of the weight buffers."""
        return sum(buffer.elements for buffer in self.buffers)

    @property
    def shard(self) -> int:
        return sum(buffer.shard for buffer in self.buffers)


def total(model: ModelConfig) -> int:
    """Return the number of parameters of a model; a tied head is not counted twice."""
    return sum(piece.elements * (piece.experts or 1) for piece in _pieces(weight_map(model)))


def trained(model: ModelConfig, lora: LoraRecipe) -> int:
    """Return the number of parameters that are trained: the adapters', or all."""
    return sum(piece.elements * (piece.experts or 1) for piece in _trained_pieces(model, lora))


def rank_buffers(
    model: ModelConfig, parallel: ParallelRecipe, processes: int, lora: LoraRecipe
) -> list[RankBuffers]:
    """Return the buffers of one rank, for each pipeline stage. Call ``layout.check`` first."""
    stages = _buffers(model, parallel, processes, _trained_pieces(model, lora))
    if not lora.rank:
        return stages
    # The model's own weights lie beside the adapters' buffers, frozen.
    whole = _buffers(model, parallel, processes, _pieces(weight_map(model)))
    return [
        RankBuffers(own.buffers, tuple(size for buffer in all_of_it.buffers for size in buffer.sizes))
        for own, all_of_it in zip(stages, whole, strict=True)
    ]


def _buffers(
    model: ModelConfig, parallel: ParallelRecipe, processes: int, pieces: tuple[_Piece, ...]
) -> list[RankBuffers]:
    chunks = layout.stages(parallel, model)
    dense_ranks = processes // (parallel.tensor * parallel.pipeline)
    expert_ranks = processes // (parallel.expert_tensor * parallel.expert * parallel.pipeline)
    stages = []
    for stage in range(parallel.pipeline):
        buffers = []
        for layers in chunks[stage :: parallel.pipeline]:
            # parameters of this chunk on one rank
            here = [piece for piece in pieces if _lies_in(piece, model, layers)]
            dense = tuple(_local(piece, parallel) for piece in here if not piece.experts)
            experts = tuple(
                _local(piece, parallel)
                for piece in here
                # Each expert of this rank has the same parameters.
                for _ in range((piece.experts or 0) // parallel.expert)
            )
            buffers.append(Buffer(dense, dense_ranks))
            if experts:
                buffers.append(Buffer(experts, expert_ranks))
        stages.append(RankBuffers(tuple(buffers)))
    return stages


@dataclass(frozen=True)
class _Piece:
    """One parameter of the model, or the corresponding parameters of all experts of a layer."""

    name: str
    layer: int | None
    elements: int
    divided: bool
    """True if tensor parallelism splits the parameter."""
    experts: int | None


def _trained_pieces(model: ModelConfig, lora: LoraRecipe) -> tuple[_Piece, ...]:
    if not lora.rank:
        return _pieces(weight_map(model))
    adapters = adapter_map(model, lora.rank, lora.targets)
    return _pieces(tuple(weight for adapter in adapters for weight in (adapter.A, adapter.B)))


@cache
def _pieces(weights: tuple[Weight, ...]) -> tuple[_Piece, ...]:
    # Number of experts of a layer, 1 without any.
    number = 1 + max(weight.expert or 0 for weight in weights)
    pieces = []
    for weight in weights:
        if weight.expert or not weight.trained:
            continue  # all experts have the sizes of expert 0; what is not trained is no parameter
        layer = re.search(r"layers\.(\d+)\.", weight.megatron)
        at, size = int(layer[1]) if layer else None, sum(map(prod, weight.shapes))
        experts = number if weight.expert == 0 else None
        pieces.append(_Piece(weight.megatron, at, size, weight.dim is not None, experts))
    return tuple(pieces)


def _lies_in(piece: _Piece, model: ModelConfig, layers: range) -> bool:
    if piece.layer is not None:
        return piece.layer in layers
    # Neither embedding nor head belongs to a layer.
    first, last = layers.start == 0, layers.stop == model.num_hidden_layers
    if piece.name.startswith("embedding"):  # the last stage has a copy that is tied to it
        return first or (last and model.tie_word_embeddings)
    return last


def _local(piece: _Piece, parallel: ParallelRecipe) -> int:
    ranks = parallel.expert_tensor if piece.experts else parallel.tensor
    return piece.elements // ranks if piece.divided else piece.elements


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


def trainer(job: Job) -> list[Trainer]:
    """Return the memory of one rank of each pipeline stage. Call ``check_layout`` first."""
    recipe, model = job.recipe, job.model
    parallel, optimizer = recipe.parallel, recipe.optimizer
    sequence = parallel.tensor > 1 and parallel.sequence is not False  # the default on GPUs
    # an update copies gradients, unless Megatron's aware optimizers read them in any dtype
    aware = optimizer.offload or optimizer.precision == "bfloat16"
    copied = 0 if aware or optimizer.grad_dtype != "bfloat16" else MAIN_WEIGHT
    return [
        Trainer(
            weights=(rank.elements + sum(rank.frozen)) * BYTES[recipe.model.dtype],
            gradients=rank.elements * BYTES[optimizer.grad_dtype],
            optimizer=rank.shard * optimizer_bytes(recipe),
            copied_gradients=copied * rank.shard,
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
    """Return optimizer bytes a parameter. In float32 the model's weights are the main weights."""
    if recipe.optimizer.precision == "bfloat16":
        return PRECISION_AWARE
    return MOMENTS + (MAIN_WEIGHT if recipe.model.dtype == "bfloat16" else 0)


def sent_tensors(job: Job) -> float:
    """Return the bytes of the two largest tensors, or of two messages of an export (models/weights.py). With
    adapters, also those of a message's merged weights, and of the largest in float32 (``lora.merged``)."""
    recipe, width = job.recipe, BYTES[job.recipe.model.dtype]
    sent = max(_two_largest(job.model) * width, 2 * SENT_AT_ONCE)
    if not recipe.lora.rank:
        return sent
    adapters = adapter_map(job.model, recipe.lora.rank, recipe.lora.targets)
    # A rank's part of the largest layer with an adapter.
    largest = max(sum(map(prod, adapter.base.shapes)) for adapter in adapters) / recipe.parallel.tensor
    return sent + max(SENT_AT_ONCE, largest * width) + MAIN_WEIGHT * largest


@cache
def _two_largest(model: ModelConfig) -> int:
    return sum(sorted({prod(shape) for weight in weight_map(model) for shape in weight.shapes})[-2:])
