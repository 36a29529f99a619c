"""Number of parameters that one GPU holds: trained ones in Megatron-Core's buffers with their padding, and,
with adapters, the model's own, which are frozen and lie alone.

Megatron's DDP puts the weights of a model chunk into one buffer and their gradients into another; experts
have separate buffers, whose data-parallel groups differ. With the distributed optimizer each parameter starts
at a multiple of 64 elements, and each bucket ends at a multiple of 128 and of the data-parallel size, since
each rank owns an equal part of every bucket (megatron/core/distributed/param_and_grad_buffer.py).
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import cache, cached_property
from math import prod

from megatron_eqlen.hf.adapter_map import adapter_map
from megatron_eqlen.hf.config import ModelConfig
from megatron_eqlen.hf.families import weight_map
from megatron_eqlen.hf.weight_map import Weight
from megatron_eqlen.recipe import LoraRecipe, ParallelRecipe, layout

PARAMETER_START = 64
BUCKET_END = 128
BUCKET_ELEMENTS = 40_000_000
"""Minimum size of a bucket whose reduction overlaps with the backward pass; at least a million per rank."""


@dataclass(frozen=True)
class Buffer:
    """One of Megatron's parameter buffers, as one rank holds it."""

    sizes: tuple[int, ...]
    """Elements of each parameter, in the order of the model."""
    ranks: int
    """Size of the data-parallel group that shares the optimizer state."""
    bucket_elements: int | None = None
    """Minimum size of a bucket; None: a single bucket."""
    shared_embedding: int = 0
    """Elements of a tied embedding that two pipeline stages hold, in a separate bucket."""

    @property
    def parameters(self) -> int:
        return sum(self.sizes) + self.shared_embedding

    @property
    def every_size(self) -> tuple[int, ...]:
        return (*self.sizes, self.shared_embedding) if self.shared_embedding else self.sizes

    @cached_property
    def buckets(self) -> list[int]:
        """Elements of each bucket, padding included."""
        buckets, end = [], 0
        for size in reversed(self.sizes):
            end = _round_up(end, PARAMETER_START) + size
            if self.bucket_elements is not None and end >= self.bucket_elements:
                buckets.append(self._bucket(end))
                end = 0
        if end:
            buckets.append(self._bucket(end))
        return buckets + ([self._bucket(self.shared_embedding)] if self.shared_embedding else [])

    @property
    def elements(self) -> int:
        """Elements of the weight buffer; the gradient buffer is as large."""
        return sum(self.buckets)

    @property
    def shard(self) -> int:
        """Maximum number of parameters that one rank of the group updates: its part of every bucket, padding
        included."""
        return sum(bucket // self.ranks for bucket in self.buckets)

    def _bucket(self, end: int) -> int:
        return _round_up(end, math.lcm(self.ranks, BUCKET_END))


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
    def parameters(self) -> int:
        return sum(buffer.parameters for buffer in self.buffers)

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
    key = parallel.model_dump_json(exclude={"context", "sequence", "recompute"})
    return _rank_buffers(model, key, processes, lora.model_dump_json())


@cache
def _rank_buffers(model: ModelConfig, key: str, processes: int, lora_key: str) -> list[RankBuffers]:
    parallel = ParallelRecipe.model_validate_json(key)
    lora = LoraRecipe.model_validate_json(lora_key)
    stages = _buffers(model, parallel, processes, _trained_pieces(model, lora))
    if not lora.rank:
        return stages
    whole = _buffers(model, parallel, processes, _pieces(weight_map(model)))
    return [
        RankBuffers(own.buffers, tuple(size for buffer in all_of_it.buffers for size in buffer.every_size))
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
        for number, layers in enumerate(chunks[stage :: parallel.pipeline]):
            # parameters of this chunk on one rank
            here = [piece for piece in pieces if _lies_in(piece, model, layers)]
            dense = tuple(_local(piece, parallel) for piece in here if not piece.experts)
            experts = tuple(
                _local(piece, parallel)
                for piece in here
                for _ in range((piece.experts or 0) // parallel.expert)
            )
            # a tied embedding on the first and the last stage has a separate bucket
            shared = 0
            tied = any(piece.name.startswith("embedding") for piece in pieces) and model.tie_word_embeddings
            if tied and parallel.pipeline > 1:
                if layers.start == 0:
                    dense, shared = dense[1:], dense[0]
                elif layers.stop == model.num_hidden_layers:
                    shared = model.vocab_size * model.hidden_size // parallel.tensor
            # only the first chunk splits its buffers into buckets
            split = parallel.overlap_grad_reduce and stage == 0 and number == 0
            least = max(BUCKET_ELEMENTS, 1_000_000 * dense_ranks) if split else None
            buffers.append(Buffer(dense, dense_ranks, least, shared))
            if experts:
                buffers.append(Buffer(experts, expert_ranks, least))
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
    if piece.name.startswith("embedding"):
        return layers.start == 0
    return layers.stop == model.num_hidden_layers


def _local(piece: _Piece, parallel: ParallelRecipe) -> int:
    if not piece.divided:
        return piece.elements
    return piece.elements // (parallel.expert_tensor if piece.experts else parallel.tensor)


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
