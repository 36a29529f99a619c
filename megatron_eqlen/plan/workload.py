"""Estimated number of tokens of a step, on the simulated responses of ``packing/simulated.py``."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np

from megatron_eqlen.packing.simulated import SHORTEST_PROMPT, simulated_responses, simulated_streams
from megatron_eqlen.packing.tree import Forest
from megatron_eqlen.recipe import Recipe

SAMPLES = 256


@dataclass(frozen=True)
class Workload:
    """Mean token counts of one step."""

    tracks: int
    """Maximum number of sequences that are decoded at once."""
    generated: float
    """Tokens of all rollouts."""
    trained: float
    """Positions of all rows; trunks that rows cut are counted once."""
    context: float
    """Mean number of tokens that a token sees."""
    cached: float
    """Mean number of KV cache entries per token; the two tracks of a stream share their trunk."""
    prompts: float = 0.0
    """Tokens of prompts that engines prefill; rollouts of a prompt share it."""


def workload(recipe: Recipe) -> Workload:
    prompts = recipe.data.prompts_per_step
    sizes = recipe.rollout.max_response_length, recipe.data.max_prompt_length
    if recipe.sampling == "equal_length":
        generated, trained, context, cached = _stream(*sizes)
        rollouts = prompts * recipe.streams_per_prompt
    else:  # also for sampled trees, where each leaf ends a response
        generated, trained, context = _response(*sizes)
        cached = context
        rollouts = prompts * recipe.group_size
    tracks = prompts * recipe.group_size
    prefilled = prompts * (SHORTEST_PROMPT + recipe.data.max_prompt_length) / 2
    return Workload(tracks, rollouts * generated, rollouts * trained, context, cached, prefilled)


@cache
def _stream(limit: int, prompt: int) -> tuple[float, float, float, float]:
    """Simulate streams of equal-length pairs. Return per stream the tokens and the positions in rows, and per
    token the tokens it sees and its share of the KV cache."""
    forest = Forest.of(simulated_streams(SAMPLES, limit, prompt))
    generated = forest.length[forest.parent >= 0].sum()
    live = forest.live
    trained = forest.length[live].sum()
    own, above = (
        (forest.length**2)[live].sum() / 2 / trained,
        (forest.position * forest.length)[live].sum() / trained,
    )
    return generated / SAMPLES, trained / SAMPLES, above + own, above / 2 + own


@cache
def _response(limit: int, prompt: int) -> tuple[float, float, float]:
    """Simulate independent responses, which share only the prompt. Return the means of tokens, positions and
    context."""
    trees = simulated_responses(SAMPLES, limit, prompt)
    lengths = np.array([len(tree.nodes[1]) for tree in trees])
    start = np.mean([len(tree.nodes[0]) for tree in trees])
    context = start + (lengths**2).sum() / 2 / lengths.sum()
    return lengths.mean(), lengths.mean() + start, context
