"""Gradient norm by kind of weight (embedding, attention, ...); the squares add up to the square of the
norm."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import tensor_parallel
from megatron.core.optimizer import ChainedOptimizer
from megatron.core.transformer.module import param_is_not_shared

from megatron_eqlen.metrics import TRAIN_GRAD_NORM
from megatron_eqlen.processes.distributed import device
from megatron_eqlen.types import Metrics

KINDS = ("embedding", "attention", "mlp", "experts", "router", "norms", "head")


def kind_of(name: str) -> str:
    """Return one of ``KINDS``, by a parameter's name in Megatron's model. Shared experts and their gate are
    ``mlp``; the weights of a token mixer besides projections (convolution, decay) are ``attention``."""
    parts = name.split(".")
    if any("norm" in part for part in parts):
        return "norms"
    for part, kind in (
        ("word_embeddings", "embedding"),
        ("output_layer", "head"),
        ("self_attention", "attention"),
        ("router", "router"),
        ("experts", "experts"),
        ("mlp", "mlp"),
    ):
        if part in parts:
            return kind
    raise ValueError(f"parameter {name!r}: expected one of {', '.join(KINDS)}, found none in its name")


def gradient_norms(chunks: list, optimizer: ChainedOptimizer) -> Metrics:
    """Return ``train/grad_norm/KIND`` for the model's kinds, over all ranks, before clipping. The gradients
    must have been reduced. Collective."""
    kinds = {parameter: kind_of(name) for chunk in chunks for name, parameter in chunk.named_parameters()}
    totals = torch.zeros(len(KINDS), dtype=torch.float64, device=device())
    present = torch.zeros_like(totals)
    for part in optimizer.chained_optimizers:
        squares = torch.zeros_like(totals)
        for parameter, shard in _shards(part):
            kind = KINDS.index(kinds[parameter])
            squares[kind] += torch.linalg.vector_norm(shard, dtype=torch.float64) ** 2
            present[kind] = 1
        dist.all_reduce(squares, group=part.get_grad_stats_parallel_group())
        totals += squares
    dist.all_reduce(present, op=dist.ReduceOp.MAX)
    found = zip(KINDS, totals.tolist(), present.tolist(), strict=True)
    return {f"{TRAIN_GRAD_NORM}/{kind}": math.sqrt(square) for kind, square, exists in found if exists}


def _shards(part: Any) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor]]:
    """Yield each parameter with the piece of its reduced gradient that this rank owns. Each piece occurs once
    in the world, as in Megatron's own norm."""
    for parameter in part.model_param_gbuf_map:
        own = part._get_model_param_range_map(parameter)["param"]
        once = param_is_not_shared(parameter) and tensor_parallel.param_is_not_tensor_parallel_duplicate(
            parameter, getattr(part, "tp_group", None)
        )
        if once:
            yield parameter, parameter.main_grad.view(-1)[own.start : own.end]
