"""Metrics of a step's comparison units."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from statistics import fmean
from typing import Any

import numpy as np

from megatron_eqlen.recipe import Recipe
from megatron_eqlen.sampling import KINDS
from megatron_eqlen.sampling.comparison import ComparisonUnit
from megatron_eqlen.tokens import VERSIONS
from megatron_eqlen.types import Metrics, Rollout


def unit_metrics(units: list[ComparisonUnit], rollouts: Sequence[Rollout], recipe: Recipe) -> Metrics:
    """Return metrics of advantages, effective samples and supervised tokens, and those of the sampling kind.

    ``objective/effective_samples`` is the paper's count: members with a non-zero advantage (a trajectory of
    a group, a side of a pair). ``objective/supervised_tokens`` counts what is trained whatever its length.
    """
    # [members of all units]
    rewards = [reward for unit in units for reward in unit.rewards]
    advantages = [value for unit in units for value in unit.advantages]
    compared = {
        **_moments("reward", rewards),
        **_moments("advantage", advantages),
        "objective/advantage_max": max(map(abs, advantages), default=0.0),
    }
    metrics = {
        **({} if recipe.supervised else compared),
        "objective/units": float(len(units)),
        "objective/members": float(len(rewards)),
        "objective/zero_advantage_fraction": _fraction(not any(unit.advantages) for unit in units),
        "objective/effective_samples": float(sum(value != 0 for value in advantages)),
        "objective/supervised_tokens": float(sum(sum(unit.lengths) for unit in units if unit.trained)),
    }
    return metrics | KINDS[recipe.sampling].objective_metrics(units, rollouts, recipe)


def staleness_metrics(
    units: Iterable[ComparisonUnit], policy_version: int, gather: Callable[[list[Any]], list[Any]]
) -> Metrics:
    """Return how many versions older than ``policy_version``, which the step trains, the weights were that
    sampled the trained tokens; empty for no tokens. ``gather`` joins the lists of all ranks, of which each
    has a share of the tokens."""
    tokens: Counter[int] = Counter()
    for segment in (member for unit in units if unit.trained for member in unit.members):
        if VERSIONS.name in segment.tokens and not segment.tokens.is_bare:
            numbers, counts = np.unique(segment.tokens[VERSIONS.name], return_counts=True)
            tokens.update(dict(zip(numbers.tolist(), counts.tolist(), strict=True)))
    ages: Counter[int] = Counter()
    for version, count in gather(list(tokens.items())):
        if version != VERSIONS.unknown:
            ages[max(policy_version - version, 0)] += count  # a run that went back may reach a version again
    if not ages:
        return {}
    total = ages.total()
    return {
        "staleness/mean": sum(age * count for age, count in ages.items()) / total,
        "staleness/max": float(max(ages)),
    } | {f"staleness/share/{age}": count / total for age, count in sorted(ages.items())}


def _moments(name: str, values: Sequence[float]) -> Metrics:
    mean = fmean(values) if values else 0.0
    # exact moments, of fractions, take a hundred times as long
    spread = math.fsum((value - mean) ** 2 for value in values) if len(set(values)) > 1 else 0.0
    return {f"objective/{name}_mean": mean, f"objective/{name}_std": math.sqrt(spread / max(len(values), 1))}


def _fraction(flags: Iterable[bool]) -> float:
    values = list(flags)
    return sum(values) / len(values) if values else 0.0
