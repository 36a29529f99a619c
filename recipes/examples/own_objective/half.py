"""An objective of one's own: PPO's surrogate, and a fixed baseline of 1/2 in place of the group's mean."""

from collections.abc import Sequence

from megatron_eqlen.objectives.aggregation import token_mean
from megatron_eqlen.objectives.objective import Objective
from megatron_eqlen.objectives.surrogates import Ppo


def above_half(rewards: Sequence[float], lengths: Sequence[int]) -> list[float]:
    return [reward - 0.5 for reward in rewards]


HALF = Objective("half", above_half, token_mean, Ppo(0.2, 0.28))
