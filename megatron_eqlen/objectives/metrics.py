"""What a step's comparison units looked like, as flat metrics."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import fmean, pstdev
from typing import Literal

from megatron_eqlen.objectives.advantages import all_equal
from megatron_eqlen.objectives.units import ComparisonUnit
from megatron_eqlen.recipe import Recipe
from megatron_eqlen.rewards.suffix import pair_rewards
from megatron_eqlen.types import Metrics, Rollout, Stream


def unit_metrics(units: list[ComparisonUnit], rollouts: Sequence[Rollout], recipe: Recipe) -> Metrics:
    """Advantages, effective samples and supervised tokens; for streams pairs and skips too.

    ``objective/effective_samples`` is the paper's count: members with a non-zero advantage (a trajectory of
    a group, a side of a pair). ``objective/supervised_tokens`` counts what is trained whatever its length.
    """
    rewards = [reward for unit in units for reward in unit.rewards]
    advantages = [value for unit in units for value in unit.advantages]
    metrics = {
        **_moments("objective/reward", rewards),
        **_moments("objective/advantage", advantages),
        "objective/advantage_max": max(map(abs, advantages), default=0.0),
        "objective/units": float(len(units)),
        "objective/zero_advantage_fraction": _fraction(not any(unit.advantages) for unit in units),
        "objective/effective_samples": float(sum(value != 0 for value in advantages)),
        "objective/supervised_tokens": float(
            sum(sum(unit.lengths) for unit in units if unit.trained),
        ),
    }
    streams = [rollout for rollout in rollouts if isinstance(rollout, Stream)]
    return metrics | (_pair_metrics(units, streams, recipe) if streams else {})


def _pair_metrics(units: list[ComparisonUnit], streams: list[Stream], recipe: Recipe) -> Metrics:
    lengths = [unit.lengths[0] for unit in units]
    return {
        "objective/pairs": float(len(units)),
        "objective/pairs_per_stream": len(units) / len(streams),
        "objective/skip_rate": _fraction(all_equal(unit.rewards) for unit in units),
        "objective/reward_gap_max_mean": _reward_gap(streams, recipe),
        "objective/segment_length_mean": fmean(lengths) if lengths else 0.0,
        "objective/segment_length_max": float(max(lengths, default=0)),
    }


def _reward_gap(streams: list[Stream], recipe: Recipe) -> float:
    """How much higher the suffix reward ``max`` is than ``mean``, on average over the B sides."""
    best, mean = (_b_rewards(streams, reduce, recipe) for reduce in ("max", "mean"))
    return fmean(best) - fmean(mean) if best else 0.0


def _b_rewards(streams: list[Stream], reduce: Literal["max", "mean"], recipe: Recipe) -> list[float]:
    rewards = [pair_rewards(stream, reduce, recipe.equal_length.unfinished) for stream in streams]
    return [pair[1] for pairs in rewards for pair in pairs if pair]


def _moments(name: str, values: Sequence[float]) -> Metrics:
    return {
        f"{name}_mean": fmean(values) if values else 0.0,
        f"{name}_std": pstdev(values) if values else 0.0,
    }


def _fraction(flags: Iterable[bool]) -> float:
    values = list(flags)
    return sum(values) / len(values) if values else 0.0
