"""Bytes that context-parallel ranks exchange (``models/context.py``): the larger of what the busiest rank
receives and sends.

The log-probs of supervised tokens, 8 bytes each, are not counted.
"""

from __future__ import annotations

from functools import cache

from megatron_eqlen.hf.config import ModelConfig
from megatron_eqlen.packing.pack import Layout
from megatron_eqlen.packing.simulated import exchanged_share, simulated_responses, simulated_streams
from megatron_eqlen.plan.activations import BYTES
from megatron_eqlen.plan.flops import attention_layers, training_passes
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


def step_bytes(recipe: Recipe, model: ModelConfig, work: Workload) -> float:
    """Return the bytes that a rank of the average pipeline stage exchanges in a step."""
    parallel = recipe.parallel
    data = recipe.world_size / (parallel.tensor * parallel.context * parallel.pipeline)
    positions, b = work.trained / data, BYTES[recipe.model.dtype]
    keys = positions * key_share(recipe)
    forward = forward_bytes(model, parallel, positions, keys, b)
    again = {"none": 0.0, "selective": attention_bytes(model, parallel, keys, b), "full": forward}
    passes = training_passes(recipe) - recipe.loss.epochs  # backward counts as two passes, one exchange
    return (passes * forward + recipe.loss.epochs * again[parallel.recompute]) / parallel.pipeline


def leaving_share(recipe: Recipe) -> float:
    """Return the share of the received bytes that come from other nodes. Ranks are placed with tensor
    parallelism innermost, then context parallelism."""
    ranks = recipe.parallel.context
    near = min(ranks, max(1, recipe.cluster.processes_per_node // recipe.parallel.tensor))
    return (ranks - near) / max(ranks - 1, 1)
