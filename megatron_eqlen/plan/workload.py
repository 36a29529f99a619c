"""How many tokens a step has: an estimate, on the responses that ``packing/simulated.py`` draws."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np

from megatron_eqlen.packing.simulated import MEDIAN, SHORTEST_PROMPT, response_length, simulated_stream
from megatron_eqlen.packing.tree import Forest
from megatron_eqlen.recipe import Recipe

SAMPLES = 256


@dataclass(frozen=True)
class Workload:
    """Of one step, on average."""

    tracks: int
    """Sequences that are decoded at once, at most."""
    generated: float
    """Tokens of all rollouts."""
    trained: float
    """Positions of all rows; trunks that rows cut are not repeated."""
    context: float
    """Tokens that a token sees, on average."""


def workload(recipe: Recipe) -> Workload:
    prompts = recipe.data.prompts_per_step
    sizes = recipe.rollout.max_response_length, recipe.data.max_prompt_length
    if recipe.sampling == "equal_length":
        generated, trained, context = _stream(*sizes)
        rollouts = prompts * recipe.streams_per_prompt
    else:  # also for sampled trees: each of their leaves ends a response
        generated, trained, context = _response(*sizes)
        rollouts = prompts * recipe.group_size
    return Workload(prompts * recipe.group_size, rollouts * generated, rollouts * trained, context)


@cache
def _stream(limit: int, prompt: int) -> tuple[float, float, float]:
    """Of a stream of equal-length pairs: tokens, positions in rows, tokens that a token sees."""
    rng = np.random.default_rng(0)
    median = max(1, round(MEDIAN * limit))
    forest = Forest.of([simulated_stream(rng, number, median, limit, prompt) for number in range(SAMPLES)])
    generated = forest.length[forest.parent >= 0].sum()
    seen = (forest.position + forest.length / 2) * forest.length
    trained = forest.length[forest.live].sum()
    return generated / SAMPLES, trained / SAMPLES, seen[forest.live].sum() / max(trained, 1)


@cache
def _response(limit: int, prompt: int) -> tuple[float, float, float]:
    """The same of an independent response."""
    rng = np.random.default_rng(0)
    median = max(1, round(MEDIAN * limit))
    lengths = np.array([min(response_length(rng, median, 0), limit) for _ in range(SAMPLES)])
    start = (min(SHORTEST_PROMPT, prompt) + prompt) / 2
    context = start + (lengths**2).sum() / 2 / lengths.sum()
    return lengths.mean(), lengths.mean() + start, context
