"""Metrics of a step's comparison units."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from statistics import fmean, pstdev

from megatron_eqlen.metrics import (
    OBJECTIVE_EFFECTIVE_SAMPLES,
    OBJECTIVE_UNITS,
    OBJECTIVE_ZERO_ADVANTAGE_FRACTION,
    STALENESS_MAX,
    STALENESS_MEAN,
)
from megatron_eqlen.recipe import Recipe
from megatron_eqlen.sampling import KINDS
from megatron_eqlen.sampling.comparison import ComparisonUnit
from megatron_eqlen.types import Metrics, Rollout, version_spans


def unit_metrics(units: list[ComparisonUnit], rollouts: Sequence[Rollout], recipe: Recipe) -> Metrics:
    """Return metrics of advantages, effective samples and supervised tokens, and those of the sampling kind.

    ``objective/effective_samples`` is the paper's count: members with a non-zero advantage (a trajectory of
    a group, a side of a pair). ``objective/supervised_tokens`` counts what is trained whatever its length.
    """
    rewards = [reward for unit in units for reward in unit.rewards]
    advantages = [value for unit in units for value in unit.advantages]
    metrics = {
        **_moments("reward", rewards),
        **_moments("advantage", advantages),
        "objective/advantage_max": max(map(abs, advantages), default=0.0),
        OBJECTIVE_UNITS: float(len(units)),
        "objective/members": float(len(rewards)),
        OBJECTIVE_ZERO_ADVANTAGE_FRACTION: _fraction(not any(unit.advantages) for unit in units),
        OBJECTIVE_EFFECTIVE_SAMPLES: float(sum(value != 0 for value in advantages)),
        "objective/supervised_tokens": float(
            sum(sum(unit.lengths) for unit in units if unit.trained),
        ),
    }
    return metrics | KINDS[recipe.sampling].objective_metrics(units, rollouts, recipe)


def staleness_metrics(units: Iterable[ComparisonUnit], policy_version: int) -> Metrics:
    """Return how many versions older than ``policy_version``, which the step trains, the weights were that
    sampled the trained tokens; empty for no tokens."""
    tokens: Counter[int] = Counter()
    for segment in (member for unit in units if unit.trained for member in unit.members):
        for start, stop, version in version_spans(segment.versions, len(segment)):
            age = max(policy_version - version, 0)  # a run that went back may reach a version again
            tokens[age] += stop - start
    if not tokens:
        return {}
    total = tokens.total()
    return {
        STALENESS_MEAN: sum(age * count for age, count in tokens.items()) / total,
        STALENESS_MAX: float(max(tokens)),
    } | {f"staleness/share/{age}": count / total for age, count in sorted(tokens.items())}


def _moments(name: str, values: Sequence[float]) -> Metrics:
    return {
        f"objective/{name}_mean": fmean(values) if values else 0.0,
        f"objective/{name}_std": pstdev(values) if values else 0.0,
    }


def _fraction(flags: Iterable[bool]) -> float:
    values = list(flags)
    return sum(values) / len(values) if values else 0.0
