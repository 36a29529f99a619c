"""Outcome profile: how much of the reward's variance is decided in each part of a response.

Lines that fork at a prefix h are independent continuations of it, so that their rewards estimate Var(R | h)
without bias: what h leaves undecided. Forks of the same rank, the first of all lines, the second and so on,
end a part of a response. If the share v_k of Var(R | prompt) is decided in part k, which ends at the share
x_k of a response's tokens, forks there give up to

    1 / (sum of sqrt(x_k v_k (x_k - x_{k-1})))^2

times the squared signal over noise of independent responses that are compared with their mean, at equal
tokens (Neyman's allocation). Where the outcome is decided evenly forks buy nothing.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from statistics import fmean
from typing import NamedTuple

from megatron_eqlen import metrics as m
from megatron_eqlen.sampling.comparison import response_reward
from megatron_eqlen.types import Metrics, Part, Rollout


class Fork(NamedTuple):
    """A part of a rollout, or its prompt, that several lines continue."""

    length: int
    """Tokens of the response before the fork."""
    after: float
    """Mean number of tokens after it."""
    weight: float
    """Weight of the line that forks."""
    variance: float
    """Unbiased estimate of the variance of the reward, given the tokens before; it may be negative."""
    behind: int
    """Forks behind it, that of the prompt included."""


class _Outcomes(NamedTuple):
    """Means over what continues a part, itself included."""

    reward: float
    square: float
    tokens: float


def forks(rollout: Rollout) -> Iterator[Fork]:
    """Yield the forks of a complete scored rollout, those of the longest lines first. Parts that the budget
    cut off are left out."""
    ends, weights, behind = rollout.ends(), rollout.weights(), rollout.along(0, lambda n, _: n + 1)
    below: dict[int, list[_Outcomes]] = defaultdict(list)
    parents = {part.number: part for part in reversed(rollout.parts)}
    # of two tracks that are truncated a stream keeps one
    twins = {part.parent for part in rollout.with_role("tail") if rollout.outcome == "truncated"}
    for number in (*parents, -1):
        part, branches = parents.get(number), below[number]
        if len(branches) > 1 or (branches and number in twins):
            after = fmean(branch.tokens for branch in branches)
            yield Fork(ends[number], after, weights[number], _variance(branches), behind[number])
        if part is not None and (outcomes := _outcomes(rollout, part, branches)) is not None:
            below[part.parent].append(outcomes)


def _outcomes(rollout: Rollout, part: Part, branches: list[_Outcomes]) -> _Outcomes | None:
    if branches:
        reward, square, tokens = map(fmean, zip(*branches, strict=True))
        return _Outcomes(reward, square, tokens + len(part))
    if part.finish_reason is None:
        return None
    reward = response_reward(part, rollout.prompt_id)
    return _Outcomes(reward, reward**2, len(part))


def _variance(branches: list[_Outcomes]) -> float:
    """Return the mean of (R - R')^2 / 2 over rewards of different branches."""
    if len(branches) == 1:
        return 0.0
    count, rewards = len(branches), [branch.reward for branch in branches]
    products = (sum(rewards) ** 2 - sum(reward**2 for reward in rewards)) / (count * (count - 1))
    return fmean(branch.square for branch in branches) - products


def profile_metrics(rollouts: Iterable[Rollout]) -> Metrics:
    """Return the ``profile/...`` metrics of complete scored rollouts; none without forks after the prompt."""
    all_forks = [fork for rollout in rollouts for fork in forks(rollout)]
    first = [fork.variance for fork in all_forks if not fork.behind]
    later = [fork for fork in all_forks if fork.behind]
    if not first or not later:
        return {}
    weight = sum(fork.weight for fork in later)
    return {
        "profile/rollouts": len(first),
        m.PROFILE_VARIANCE: fmean(first),
        "profile/forks": len(later),
        m.PROFILE_UNDECIDED: sum(fork.weight * fork.variance for fork in later) / weight,
        m.PROFILE_TOKENS_AFTER: sum(fork.weight * fork.after for fork in later)
        / sum(fork.weight * (fork.length + fork.after) for fork in later),
    }


def gain_metrics(metrics: Metrics) -> Metrics:
    """Return ``profile/fork_gain`` of a whole step's ``profile_metrics``; nothing where no reward varies."""
    if metrics.get(m.PROFILE_VARIANCE, 0.0) <= 0:
        return {}
    undecided = min(max(metrics[m.PROFILE_UNDECIDED] / metrics[m.PROFILE_VARIANCE], 0.0), 1.0)
    ends, decided = [1 - metrics[m.PROFILE_TOKENS_AFTER], 1.0], [1 - undecided, undecided]
    return {m.PROFILE_FORK_GAIN: fork_gain(ends, decided)}


def fork_gain(ends: Sequence[float], decided: Sequence[float]) -> float:
    """Return what the best numbers of lines at forks give: the factor of squared signal over noise at equal
    tokens.

    ``ends``: shares of a response's tokens at the ends of its parts, the last one 1; ``decided``: shares of
    the reward's variance that are decided in them, of sum 1.
    """
    parts = zip(ends, [0.0, *ends], decided, strict=False)
    noise = sum(math.sqrt(end * (end - start) * share) for end, start, share in parts)
    return 1 / max(noise, 1e-3) ** 2
