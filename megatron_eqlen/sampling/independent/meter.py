"""The shape of harvested completions, as metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from statistics import fmean

from megatron_eqlen.metrics import (
    HARVEST_RESPONSE_LENGTH,
    HARVEST_SUPERVISED_TOKENS,
    HARVEST_TRUNCATED_FRACTION,
)
from megatron_eqlen.recipe import Recipe
from megatron_eqlen.sampling.comparison import ComparisonUnit
from megatron_eqlen.sampling.context import seen
from megatron_eqlen.sampling.independent.compare import reward
from megatron_eqlen.sampling.kind import Draw
from megatron_eqlen.types import Group, Metrics, SampledTree


def shape(groups: Sequence[Group]) -> Metrics:
    return completions(groups) | seen(groups, lambda group: [0] * len(group.completions))


def completions(rollouts: Sequence[Group] | Sequence[SampledTree]) -> Metrics:
    """How many completions (steps, of sampled trees), how long, and why they ended."""
    segments = [segment for rollout in rollouts for segment in rollout.segments()]
    lengths = [len(segment) for segment in segments]
    reasons = Counter(segment.finish_reason for segment in segments)
    return {
        "harvest/completions": len(segments),
        HARVEST_SUPERVISED_TOKENS: sum(lengths),
        HARVEST_RESPONSE_LENGTH: fmean(lengths),
        "harvest/response_length_max": max(lengths),
        HARVEST_TRUNCATED_FRACTION: reasons["length"] / len(segments),
        "harvest/budget_fraction": reasons[None] / len(segments),
    }


def draws(group: Group) -> Iterator[Draw]:
    """All alike."""
    for one in group.completions:
        yield Draw(1 / len(group.completions), len(one), reward(one, group.prompt_id))


def nothing_more(units: Sequence[ComparisonUnit], rollouts: Sequence[object], recipe: Recipe) -> Metrics:
    """No metrics of its own: those of every kind say all about these units."""
    return {}
