"""The shape of harvested completions, as metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from statistics import fmean

from megatron_eqlen.metrics import (
    HARVEST_RESPONSE_LENGTH,
    HARVEST_SUPERVISED_TOKENS,
    HARVEST_TRUNCATED_FRACTION,
)
from megatron_eqlen.recipe import Recipe
from megatron_eqlen.sampling.comparison import ComparisonUnit
from megatron_eqlen.types import Group, Metrics, SampledTree


def shape(rollouts: Sequence[Group] | Sequence[SampledTree]) -> Metrics:
    """How many completions (steps, of sampled trees), how long, and why they ended."""
    completions = [segment for rollout in rollouts for segment in rollout.segments()]
    lengths = [len(completion) for completion in completions]
    reasons = Counter(completion.finish_reason for completion in completions)
    return {
        "harvest/completions": len(completions),
        HARVEST_SUPERVISED_TOKENS: sum(lengths),
        HARVEST_RESPONSE_LENGTH: fmean(lengths),
        "harvest/response_length_max": max(lengths),
        HARVEST_TRUNCATED_FRACTION: reasons["length"] / len(completions),
        "harvest/budget_fraction": reasons[None] / len(completions),
    }


def nothing_more(units: Sequence[ComparisonUnit], rollouts: Sequence[object], recipe: Recipe) -> Metrics:
    """No metrics of its own: those of every kind say all about these units."""
    return {}
