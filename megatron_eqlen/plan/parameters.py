"""Number of parameters that one GPU holds: trained ones in Megatron-Core's buffers and, with adapters, the
model's own, which are frozen and lie alone.

Megatron's DDP puts the weights of a model chunk into one buffer and their gradients into another; experts
have separate buffers, whose data-parallel groups differ. With the distributed optimizer each rank of a group
owns an equal part of every buffer. The padding between parameters, at most 63 elements each and some
hundreds at the end of a bucket (megatron/core/distributed/param_and_grad_buffer.py), is not counted.
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
from megatron_eqlen.recipe import LoraRecipe, ParallelRecipe, layout


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
    number = 1 + max(weight.expert or 0 for weight in weights)
    pieces = []
    for weight in weights:
        if weight.expert:
            continue  # all experts have the sizes of expert 0
        layer = re.search(r"layers\.(\d+)\.", weight.megatron)
        pieces.append(
            _Piece(
                weight.megatron,
                int(layer[1]) if layer else None,
                sum(map(prod, weight.shapes)),
                weight.dim is not None,
                number if weight.expert == 0 else None,
            )
        )
    return tuple(pieces)


def _lies_in(piece: _Piece, model: ModelConfig, layers: range) -> bool:
    if piece.layer is not None:
        return piece.layer in layers
    first, last = layers.start == 0, layers.stop == model.num_hidden_layers
    if piece.name.startswith("embedding"):  # the last stage has a copy that is tied to it
        return first or (last and model.tie_word_embeddings)
    return last


def _local(piece: _Piece, parallel: ParallelRecipe) -> int:
    if not piece.divided:
        return piece.elements
    return piece.elements // (parallel.expert_tensor if piece.experts else parallel.tensor)
