"""Rewards of one comparison unit -> advantages. Plain floats, fp64; equal rewards give exactly 0."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, pstdev

from megatron_eqlen.objectives.registry import Objective
from megatron_eqlen.sampling.comparison import all_equal


def estimate(objective: Objective, rewards: Sequence[float], lengths: Sequence[int]) -> list[float]:
    """One advantage a member. ``lengths`` are the members' tokens (GR3 alone looks at them).

    ``batch_whitened`` is centred here; ``whiten`` divides once the whole batch is known.
    """
    if objective.advantage == "gr3":
        rewards = gr3_rewards(rewards, lengths, objective.gr3_alpha)
    if all_equal(rewards):
        return [0.0] * len(rewards)
    mean = fmean(rewards)
    centred = [reward - mean for reward in rewards]
    if objective.advantage == "grpo":
        std = pstdev(rewards)
        return [value / std for value in centred]
    if objective.advantage == "rloo":
        return [value * len(rewards) / (len(rewards) - 1) for value in centred]
    return centred


def gr3_rewards(rewards: Sequence[float], lengths: Sequence[int], alpha: float) -> list[float]:
    """GR3: r / (1 + alpha x length / mean length of the group)."""
    mean_length = fmean(lengths)
    return [r / (1 + alpha * n / mean_length) for r, n in zip(rewards, lengths, strict=True)]


def whiten(groups: list[list[float]]) -> list[list[float]]:
    """DLER's batch normalisation: centred advantages over their population std in the whole batch.

    The batch's mean is zero because every group's is; subtracting its round-off would move exact zeros.
    """
    flat = [value for group in groups for value in group]
    std = math.sqrt(fmean(value * value for value in flat)) if flat else 0.0
    return [[value / std for value in group] for group in groups] if std else groups
