"""What context-parallel ranks send each other (``models/context.py``): bytes that the busiest one gets or
gives, whichever are more.

Left out are the log-probs of supervised tokens, 8 bytes each.
"""

from __future__ import annotations

from functools import cache

from megatron_eqlen.hf.config import ModelConfig
from megatron_eqlen.hf.cost import attention_layers
from megatron_eqlen.packing.pack import Layout
from megatron_eqlen.packing.simulated import exchanged_share, simulated_responses, simulated_streams
from megatron_eqlen.plan.activations import BYTES
from megatron_eqlen.plan.flops import training_passes
from megatron_eqlen.plan.workload import Workload
from megatron_eqlen.recipe import ParallelRecipe, Recipe

SIMULATED = 64
"""Streams or responses that stand for a step's."""


def key_bytes(model: ModelConfig, parallel: ParallelRecipe, b: int) -> float:
    """A position's key and value in an attention layer, of this rank's heads. ``b``: bytes of a number."""
    return 2 * model.num_key_value_heads * model.head_dim / parallel.tensor * b


def forward_bytes(
    model: ModelConfig, parallel: ParallelRecipe, positions: float, keys: float, b: int
) -> float:
    """In a forward pass through all layers. ``positions``: of rows, on all context-parallel ranks; ``keys``:
    those of them whose keys the rank gets or gives. A backward pass sends as much, the other way."""
    attention = attention_bytes(model, parallel, keys, b)
    net, ranks = model.delta_net, parallel.context
    if net is None:
        return attention
    values = net.num_value_heads * net.value_head_dim
    there = 2 * net.num_key_heads * net.key_head_dim + values + 2 * net.num_value_heads  # beta and decay
    foreign = positions / ranks * (ranks - 1) / ranks
    return attention + sum(net.layers) * foreign * (there + values) / parallel.tensor * b


def attention_bytes(model: ModelConfig, parallel: ParallelRecipe, keys: float, b: int) -> float:
    """Of these, those in attention layers."""
    return attention_layers(model) * keys * key_bytes(model, parallel, b)


def key_share(recipe: Recipe) -> float:
    """Of a row's positions those whose keys the busiest rank gets or gives: an estimate, on simulated
    rollouts."""
    sizes = recipe.rollout.max_response_length, recipe.data.max_prompt_length
    pairs, packing = recipe.sampling == "equal_length", recipe.packing
    return _key_share(pairs, *sizes, packing.max_tokens_per_row, recipe.parallel.context, packing.layout)


@cache
def _key_share(pairs: bool, limit: int, prompt: int, budget: int, ranks: int, layout: Layout) -> float:
    trees = (simulated_streams if pairs else simulated_responses)(SIMULATED, limit, prompt)
    return exchanged_share(trees, budget, ranks, layout)


def step_bytes(recipe: Recipe, model: ModelConfig, work: Workload) -> float:
    """In a step, by a rank of the average pipeline stage."""
    parallel = recipe.parallel
    data = recipe.world_size / (parallel.tensor * parallel.context * parallel.pipeline)
    positions, b = work.trained / data, BYTES[recipe.model.dtype]
    keys = positions * key_share(recipe)
    forward = forward_bytes(model, parallel, positions, keys, b)
    again = {"none": 0.0, "selective": attention_bytes(model, parallel, keys, b), "full": forward}
    passes = training_passes(recipe) - recipe.loss.epochs  # a backward pass counts as two there, sends as one
    return (passes * forward + recipe.loss.epochs * again[parallel.recompute]) / parallel.pipeline


def leaving_share(recipe: Recipe) -> float:
    """Of what a rank gets, the part from other nodes. Tensor-parallel ranks are neighbours, then those of one
    context."""
    ranks = recipe.parallel.context
    near = min(ranks, max(1, recipe.cluster.processes_per_node // recipe.parallel.tensor))
    return (ranks - near) / max(ranks - 1, 1)
