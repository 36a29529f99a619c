"""Rewards of one comparison unit -> advantages. An estimator takes (rewards, lengths in tokens) of a unit's
members and returns one advantage a member: plain floats, fp64; equal rewards give exactly 0."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from statistics import fmean, pstdev

from megatron_eqlen.sampling.comparison import all_equal

Estimator = Callable[[Sequence[float], Sequence[int]], list[float]]
"""(rewards, lengths in tokens) of a unit's members -> their advantages."""
NOT_BELOW_0 = "it makes rewards negative, and the advantage needs rewards of at least 0: set it to 0"


def refusing(**reasons: str) -> Callable[[Estimator], Estimator]:
    """Declare why a part cannot be used with a setting, by the settings' names in ``checks.settings``."""

    def declare(part: Estimator) -> Estimator:
        part.refuses = reasons  # pyright: ignore[reportFunctionMemberAccess]
        return part

    return declare


@refusing(on_policy="divided by the std of a pair, an advantage is only the sign of the pair's gap; use rloo")
def grpo(rewards: Sequence[float], lengths: Sequence[int]) -> list[float]:
    """Return (r - mean) / population std: ±1 on a pair with unequal rewards, as the paper states."""
    # sorted: one cached value for all orders of the same rewards
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


@refusing(
    on_policy="the mean of a pair or of siblings is no estimate of the prompt's pass rate, which it divides "
    "by; use sampling: independent, or rloo",
    overlong_buffer=NOT_BELOW_0,
)
def maxrl(rewards: Sequence[float], lengths: Sequence[int]) -> list[float]:
    """Return (r - mean) / mean, or 0: gradient of the truncated log-likelihood (MaxRL, arXiv 2602.02710)."""
    _refuse_negative(rewards, "advantage maxrl divides by the mean reward")
    mean = fmean(rewards)
    return [value / mean if mean else 0.0 for value in dr_grpo(rewards, lengths)]


def reward(rewards: Sequence[float], lengths: Sequence[int]) -> list[float]:
    """Return r itself: REINFORCE++ compares with the whole batch only (``whiten``)."""
    return list(rewards)


def none(rewards: Sequence[float], lengths: Sequence[int]) -> list[float]:
    """Return zeros: the teacher alone decides (``policy_loss``)."""
    return [0.0] * len(rewards)


@refusing(
    equal_length="it scales rewards by length / mean length of the group, which is 1 for both sides of an "
    "equal-length pair; use dr_grpo, which it then equals up to the factor 1 / (1 + alpha)",
    on_policy="it scales rewards by lengths; use rloo",
    overlong_buffer=NOT_BELOW_0,
)
def gr3(rewards: Sequence[float], lengths: Sequence[int]) -> list[float]:
    """Return r / (1 + 0.33 x length / mean length of the unit), less the mean of these (GR3)."""
    _refuse_negative(rewards, "objective: gr3 divides rewards by lengths")
    mean_length = fmean(lengths)
    scaled = [r / (1 + 0.33 * n / mean_length) for r, n in zip(rewards, lengths, strict=True)]
    return dr_grpo(scaled, lengths)


def _refuse_negative(rewards: Sequence[float], why: str) -> None:
    if min(rewards) < 0:
        raise ValueError(f"{why}: expected rewards of at least 0, found {min(rewards):g}")


ADVANTAGES: dict[str, Estimator] = {
    part.__name__: part for part in (grpo, dr_grpo, rloo, maxrl, reward, gr3, none)
}


def whiten(groups: list[list[float]], centre: bool) -> list[list[float]]:
    """Divide advantages by their population std in the whole batch; with ``centre`` subtract the mean first.
    Groups that are centred (DLER, REINFORCE++ with baseline) need none: round-off would move exact zeros."""
    flat = [value for group in groups for value in group]
    if centre and flat:
        flat = dr_grpo(flat, ())
        centred = iter(flat)
        groups = [[next(centred) for _ in group] for group in groups]
    std = math.sqrt(fmean(value * value for value in flat)) if flat else 0.0
    return [[value / std for value in group] for group in groups] if std else groups
