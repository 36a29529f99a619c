"""Bytes that ranks exchange in training: the larger of what the busiest rank receives and sends.

Context parallelism (``models/context.py``) is counted for simulated rows; tensor and expert parallelism and
gradients follow from Megatron-Core's collectives. The log-probs of supervised tokens, 8 bytes each, are not
counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from megatron_eqlen.hf.config import ModelConfig
from megatron_eqlen.packing.pack import Layout
from megatron_eqlen.packing.simulated import exchanged_share, simulated_responses, simulated_streams
from megatron_eqlen.plan.activations import BYTES
from megatron_eqlen.plan.flops import attention_layers, training_passes
from megatron_eqlen.plan.parameters import rank_buffers
from megatron_eqlen.plan.workload import Workload
from megatron_eqlen.recipe import ParallelRecipe, Recipe

SIMULATED = 64
"""Number of simulated streams or responses that represent a step."""


def key_bytes(model: ModelConfig, parallel: ParallelRecipe, b: int) -> float:
    """Return the bytes of a position's key and value in an attention layer, for this rank's heads. ``b``:
    bytes of a number."""
    return 2 * model.num_key_value_heads * model.head_dim / parallel.tensor * b


def forward_bytes(
    model: ModelConfig, parallel: ParallelRecipe, positions: float, keys: float, b: int
) -> float:
    """Return the bytes of a forward pass through all layers. ``positions``: positions of the rows on all
    context-parallel ranks; ``keys``: positions whose keys the rank receives or sends. A backward pass
    exchanges as many bytes in the opposite direction."""
    attention = attention_bytes(model, parallel, keys, b)
    net, ranks = model.delta_net, parallel.context
    if net is None:
        return attention
    values = net.num_value_heads * net.value_head_dim
    scattered = 2 * net.num_key_heads * net.key_head_dim + values + 2 * net.num_value_heads  # beta and decay
    foreign = positions / ranks * (ranks - 1) / ranks
    return attention + sum(net.layers) * foreign * (scattered + values) / parallel.tensor * b


def attention_bytes(model: ModelConfig, parallel: ParallelRecipe, keys: float, b: int) -> float:
    """Return the bytes exchanged in attention layers."""
    return attention_layers(model) * keys * key_bytes(model, parallel, b)


def key_share(recipe: Recipe) -> float:
    """Return the share of a row's positions whose keys the busiest rank receives or sends, estimated on
    simulated rollouts."""
    sizes = recipe.rollout.max_response_length, recipe.data.max_prompt_length
    pairs, packing = recipe.sampling == "equal_length", recipe.packing
    return _key_share(pairs, *sizes, packing.max_tokens_per_row, recipe.parallel.context, packing.layout)


@cache
def _key_share(pairs: bool, limit: int, prompt: int, budget: int, ranks: int, layout: Layout) -> float:
    trees = (simulated_streams if pairs else simulated_responses)(SIMULATED, limit, prompt)
    return exchanged_share(trees, budget, ranks, layout)


@dataclass(frozen=True)
class Exchange:
    """Bytes that a rank exchanges with ranks of its node (``near``) and of others (``far``)."""

    near: float
    far: float

    @classmethod
    def split(cls, size: float, far: float) -> Exchange:
        return cls((1 - far) * size, far * size)


def exchanges(recipe: Recipe, model: ModelConfig, work: Workload) -> dict[str, Exchange]:
    """Return the bytes of a step by kind of parallelism, for a rank of the average pipeline stage. Call
    ``layout.check`` first."""
    parallel = recipe.parallel
    found = {
        "tensor": Exchange.split(tensor_bytes(recipe, model, work), _leaving(recipe, parallel.tensor, 1)),
        "context": Exchange.split(step_bytes(recipe, model, work), leaving_share(recipe)),
        "experts": Exchange.split(
            expert_bytes(recipe, model, work), _leaving(recipe, parallel.expert, parallel.expert_tensor)
        ),
        "gradients": gradient_bytes(recipe, model),
    }
    return {kind: size for kind, size in found.items() if size.near + size.far}


def step_bytes(recipe: Recipe, model: ModelConfig, work: Workload) -> float:
    """Return the bytes of context parallelism."""
    parallel = recipe.parallel
    if parallel.context == 1:
        return 0.0
    positions, b = _positions(recipe, work), BYTES[recipe.model.dtype]
    keys = positions * key_share(recipe)
    forward = forward_bytes(model, parallel, positions, keys, b)
    again = {"none": 0.0, "selective": attention_bytes(model, parallel, keys, b), "full": forward}
    return _of_all_passes(recipe, forward, again[parallel.recompute])


def tensor_bytes(recipe: Recipe, model: ModelConfig, work: Workload) -> float:
    """Return the bytes of tensor parallelism: two gathers and two scatters of a layer's positions in a
    forward pass."""
    parallel = recipe.parallel
    position = 4 * model.num_hidden_layers * model.hidden_size * BYTES[recipe.model.dtype]
    foreign = _positions(recipe, work) / parallel.context * (parallel.tensor - 1) / parallel.tensor
    forward = foreign * position
    return _of_all_passes(recipe, forward, forward if parallel.recompute == "full" else 0.0)


def expert_bytes(recipe: Recipe, model: ModelConfig, work: Workload) -> float:
    """Return the bytes of expert parallelism: tokens to their experts and back."""
    parallel, experts = recipe.parallel, model.experts
    if experts is None:
        return 0.0
    tokens = _positions(recipe, work) / (parallel.context * parallel.tensor) * experts.num_experts_per_tok
    token = 2 * sum(experts.layers) * model.hidden_size * BYTES[recipe.model.dtype]
    forward = tokens * (parallel.expert - 1) / parallel.expert * token
    return _of_all_passes(recipe, forward, forward if parallel.recompute == "full" else 0.0)


def gradient_bytes(recipe: Recipe, model: ModelConfig) -> Exchange:
    """Return the bytes of all updates: gradients are summed and scattered, weights gathered."""
    parallel, near = recipe.parallel, recipe.cluster.processes_per_node
    each = BYTES[recipe.optimizer.grad_dtype] + BYTES[recipe.model.dtype]
    rank = max(rank_buffers(model, parallel, recipe.world_size, recipe.lora), key=lambda rank: rank.elements)
    size = recipe.loss.minibatches * recipe.loss.epochs * each
    moved = {True: 0.0, False: 0.0}
    for buffer in rank.buffers:
        spans = buffer.ranks * parallel.tensor > near
        moved[spans] += size * buffer.elements * (buffer.ranks - 1) / buffer.ranks
    return Exchange(moved[False], moved[True])


def _positions(recipe: Recipe, work: Workload) -> float:
    """Return the positions that the ranks of one copy of the model train."""
    parallel = recipe.parallel
    return work.trained * (parallel.tensor * parallel.context * parallel.pipeline) / recipe.world_size


def _of_all_passes(recipe: Recipe, forward: float, again: float) -> float:
    """Return the bytes of a step on the average pipeline stage. ``again``: bytes of the recomputation."""
    passes = training_passes(recipe) - recipe.loss.epochs  # backward counts as two passes, one exchange
    return (passes * forward + recipe.loss.epochs * again) / recipe.parallel.pipeline


def _leaving(recipe: Recipe, ranks: int, inner: int) -> float:
    """Return the share of the bytes that come from other nodes, in a group of ``ranks`` ranks that are
    ``inner`` apart."""
    near = min(ranks, max(1, recipe.cluster.processes_per_node // inner))
    return (ranks - near) / max(ranks - 1, 1)


def leaving_share(recipe: Recipe) -> float:
    """Return the share of the bytes that context-parallel ranks receive from other nodes. Ranks are placed
    with tensor parallelism innermost, then context parallelism."""
    return _leaving(recipe, recipe.parallel.context, recipe.parallel.tensor)
