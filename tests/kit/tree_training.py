"""Loss and gradients of token trees on any parallel layout, by Hugging Face weight name, for comparison.

The loss is the plain weighted sum of log-probs, sum of weight x advantage x log-prob: every objective is this
in its first update.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.transformer.moe import moe_utils, router
from megatron.core.transformer.moe.router import TopKRouter

from megatron_eqlen.hf.adapter_map import AdapterWeights, adapter_map
from megatron_eqlen.hf.config import read_config
from megatron_eqlen.models.build import build_model
from megatron_eqlen.models.groups import start, stop
from megatron_eqlen.models.lora import adapters
from megatron_eqlen.models.names import model_config
from megatron_eqlen.models.router_replay import moe_layers
from megatron_eqlen.models.weights import export_adapters, export_hf, load_hf
from megatron_eqlen.packing.pack import plan_rows
from megatron_eqlen.processes.distributed import gather
from megatron_eqlen.recipe import ParallelRecipe
from megatron_eqlen.training.exchange import Placement, exchange_paths
from megatron_eqlen.training.forward import row_multiple, run_rows
from megatron_eqlen.training.logprobs import token_logprobs
from megatron_eqlen.types import Row, TokenTree


class TorchOfDoubles:
    """``torch`` whose softmax of doubles has doubles: Megatron's router asks for float32 in any model, and
    would turn an error of 1e-16 into 1e-7."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def softmax(scores: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.softmax(scores, dim, dtype=None if scores.dtype == torch.float64 else dtype)


moe_utils.torch = TorchOfDoubles()


def routing(logits: torch.Tensor, *args: Any, **options: Any) -> Any:
    """Route as Megatron, whose scores are of float32, with scores in the dtype of ``logits``."""
    same = torch.Tensor.double if logits.dtype == torch.float64 else torch.Tensor.float
    with patch.object(torch.Tensor, "float", same):
        return moe_utils.topk_routing_with_score_function(logits, *args, **options)


router.topk_routing_with_score_function = routing


@dataclass
class Trained:
    """Results of one pass over all trees."""

    loss: float
    gradients: dict[str, torch.Tensor]
    logprobs: dict[int, np.ndarray] = field(default_factory=dict)
    """Log-probs by segment id."""


Prepare = Callable[[list], None]
"""Changes a model's chunks when their weights are loaded."""


def build(folder: Path, parallel: ParallelRecipe, prepare: Prepare | None = None, **overrides: Any) -> list:
    """Build the float64 model of ``folder`` with gradients that Megatron only sums."""
    chunks = build_model(read_config(folder), parallel, torch.float64, **overrides)
    load_hf(chunks, folder)
    if prepare:
        prepare(chunks)
    config = chunks[0].config
    config.finalize_model_grads_func = lambda model, _count=None, **options: finalize_model_grads(
        model, None, **options
    )
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=False, use_distributed_optimizer=False)
    return [
        DistributedDataParallel(config, ddp, chunk, disable_bucketing=i > 0) for i, chunk in enumerate(chunks)
    ]


@contextmanager
def world_of(
    folder: Path, parallel: ParallelRecipe | None = None, prepare: Prepare | None = None, **overrides: Any
) -> Iterator[list]:
    """Yield ``build``'s model, in a world of its own."""
    parallel = parallel or ParallelRecipe()
    start(parallel, seed=1)
    try:
        model = build(folder, parallel, prepare, **overrides)
        yield model
        # Autograd's hooks keep each chunk alive in a circle that Python's collector does not see. An
        # empty chunk keeps no process groups, and so none of gloo's threads: they wake 100 times a second.
        for chunk in model:
            vars(chunk).clear()
    finally:
        stop()


def train_trees(
    folder: Path, trees: list[TokenTree], budget: int, layout: str = "tree",
    layers: dict[str, Any] | None = None, overrides: dict[str, Any] | None = None, multiple_of: int = 1,
    prepare: Prepare | None = None,
) -> Trained | None:  # fmt: skip
    """Train the trees in each rank of a world, laid out as a recipe's ``layers``; return rank 0's result."""
    with world_of(folder, ParallelRecipe(**layers or {}), prepare, **overrides or {}) as model:
        multiple = math.lcm(row_multiple(model[0].config), multiple_of)
        ranks = parallel_state.get_data_parallel_world_size()
        planned = plan_rows(trees, budget, ranks, multiple, layout)
        routed = moe_layers(chunk.module for chunk in model)
        placement = Placement(parallel_state.get_data_parallel_rank(), False, routed)
        rows = exchange_paths(planned, gather([placement]))[0].rows(placement.data_parallel)
        logs = run_rows(model, rows, 1.0, weighted_sum, train=True)
        trained = Trained(_summed([loss for loss, _ in logs]), gradients(model))
        trained.logprobs = _by_segment(rows, [values for _, values in logs])
        return trained


def weighted_sum(logprobs: torch.Tensor, entropy: torch.Tensor, row: Row, at: np.ndarray) -> tuple:
    """Return the loss of a row and its log: (loss, log-probs)."""
    loss = (logprobs * torch.from_numpy(row.weights[at] * row.advantages[at])).sum()
    return loss, (loss.item(), logprobs.detach().numpy())


def train_sequences(model: list, sequences: Iterable[tuple[list[int], np.ndarray]]) -> Trained:
    """Train the same loss on causal sequences: tokens, and each log-prob's factor from the second on."""
    (chunk,) = model
    chunk.zero_grad_buffer()
    total = 0.0
    for tokens, factors in sequences:
        ids = torch.tensor(tokens)[None]
        logits = chunk(ids[:, :-1], torch.arange(ids.shape[1] - 1)[None], None)[0]
        logprobs, _ = token_logprobs(logits, ids[0, 1:])
        loss = (logprobs * torch.from_numpy(factors)).sum()
        loss.backward()
        total += loss.item()
    return Trained(total, gradients(model))


def gradients(model: list) -> dict[str, torch.Tensor]:
    """Return whole gradients by Hugging Face name, of the adapters alone if the model has any: written over
    the weights, then exported as weights."""
    chunks = [chunk.module for chunk in model]
    parameters = [p for chunk in chunks for p in chunk.parameters() if p.requires_grad]
    weights = [parameter.data.clone() for parameter in parameters]
    for parameter in parameters:
        parameter.data.copy_(parameter.main_grad)
    stream = export_adapters(chunks, adapters_of(chunks)) if adapters(chunks) else export_hf(chunks)
    exported = {name: tensor.clone() for name, tensor in stream}
    for parameter, weight in zip(parameters, weights, strict=True):
        parameter.data.copy_(weight)
    return exported


def adapters_of(chunks: list) -> tuple[AdapterWeights, ...]:
    rank = next(iter(adapters(chunks).values())).A.shape[0]
    return adapter_map(model_config(chunks), rank, None)


def record_experts(model: list) -> list[torch.Tensor]:
    """Return a list that receives each router's choice, [tokens, experts] bool, by layer."""
    choices: list[torch.Tensor] = []
    for module in model[0].modules():
        if isinstance(module, TopKRouter):
            module.register_forward_hook(lambda _module, _inputs, output: choices.append(output[1].bool()))
    return choices


def assert_same(ours: Trained, reference: Trained) -> None:
    """Assert equality up to the order of sums in float64."""
    assert ours.loss == pytest.approx(reference.loss, rel=1e-12)
    difference, weight = worst_difference(ours, reference)
    assert difference <= 1e-12, f"{weight}: {difference}"


def worst_difference(a: Trained, b: Trained) -> tuple[float, str]:
    """Return the largest relative difference of a gradient (norm over norm), and its name."""
    assert a.gradients.keys() == b.gradients.keys()
    return max(
        (float((a.gradients[name] - mine).norm() / mine.norm().clamp_min(1e-300)), name)
        for name, mine in b.gradients.items()
    )


def _summed(losses: list[float]) -> float:
    """Return the sum over data-parallel ranks; only the last pipeline stage has losses."""
    total = torch.tensor([sum(losses)], dtype=torch.float64)
    if parallel_state.get_tensor_and_context_parallel_rank() > 0:
        total.zero_()
    dist.all_reduce(total)
    return total.item()


def _by_segment(rows: list[Row], logprobs: list[np.ndarray]) -> dict[int, np.ndarray]:
    found: dict[int, np.ndarray] = {}
    for row, values in zip(rows, logprobs, strict=False):
        segments = row.segment_ids[row.segment_ids >= 0]
        found |= {int(segment): values[segments == segment] for segment in np.unique(segments)}
    return found
