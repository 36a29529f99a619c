"""Rewards of one comparison unit -> advantages. Plain floats, fp64; equal rewards give exactly 0.

An estimator takes (rewards, lengths in tokens) of a unit's members and returns one advantage a member.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from statistics import fmean, pstdev

from megatron_eqlen.sampling.comparison import all_equal

Estimator = Callable[[Sequence[float], Sequence[int]], list[float]]
"""(rewards, lengths in tokens) of a unit's members -> their advantages."""


def refusing(**reasons: str) -> Callable[[Estimator], Estimator]:
    """Declare why a part cannot be used with a setting, by the settings' names in ``checks.settings``."""

    def declare(part: Estimator) -> Estimator:
        part.refuses = reasons  # pyright: ignore[reportFunctionMemberAccess]
        return part

    return declare


@refusing(on_policy="divided by the std of a pair, an advantage is only the sign of the pair's gap; use rloo")
def grpo(rewards: Sequence[float], lengths: Sequence[int]) -> list[float]:
    """Return (r - mean) / population std: ±1 on a pair with unequal rewards, as the paper states."""
    std = deviation(tuple(sorted(rewards))) or 1.0
    return [value / std for value in dr_grpo(rewards, lengths)]


@lru_cache(1 << 12)
def deviation(rewards: tuple[float, ...]) -> float:
    """Return ``pstdev``, the population std of sorted rewards, which is exact but slow."""
    return (rewards[1] - rewards[0]) / 2 if len(rewards) == 2 else pstdev(rewards)


def dr_grpo(rewards: Sequence[float], lengths: Sequence[int]) -> list[float]:
    """Return r - mean."""
    if all_equal(rewards):
        return [0.0] * len(rewards)
    mean = fmean(rewards)
    return [reward - mean for reward in rewards]


def rloo(rewards: Sequence[float], lengths: Sequence[int]) -> list[float]:
    """Return r - mean of the others = n / (n - 1) x (r - mean)."""
    n = len(rewards)
    return [value * n / max(n - 1, 1) for value in dr_grpo(rewards, lengths)]


def reward(rewards: Sequence[float], lengths: Sequence[int]) -> list[float]:
    """Return r itself: REINFORCE++ compares with the whole batch only (``whiten``)."""
    return list(rewards)


def none(rewards: Sequence[float], lengths: Sequence[int]) -> list[float]:
    """Return zeros: the teacher alone decides (``policy_loss``)."""
    return [0.0] * len(rewards)


ADVANTAGES: dict[str, Estimator] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "reward": reward,
    "none": none,
}


def whiten(groups: list[list[float]], centre: bool) -> list[list[float]]:
    """Divide advantages by their population std in the whole batch; with ``centre`` subtract their mean
    before.

    Without ``centre`` the groups must be centred (DLER, REINFORCE++ with baseline): the batch's mean is zero
    then, and subtracting its round-off would move exact zeros.
    """
    flat = [value for group in groups for value in group]
    if centre and flat:
        mean = flat[0] if all_equal(flat) else fmean(flat)
        groups = [[value - mean for value in group] for group in groups]
        flat = [value for group in groups for value in group]
    std = math.sqrt(fmean(value * value for value in flat)) if flat else 0.0
    return [[value / std for value in group] for group in groups] if std else groups
