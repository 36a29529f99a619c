"""A grader without information: it flips a fair coin for each response.

What a run with it changes (length, entropy, accuracy) is drift of the method, not learning.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from megatron_eqlen.recipe import RewardRecipe
from megatron_eqlen.types import Grade

SEED = 0


class Coin:
    """Flips one coin for each response, in the order in which responses are graded.

    The flips do not depend on texts: a policy cannot learn which of them are lucky.
    """

    def __init__(self, settings: RewardRecipe) -> None:
        self.random = random.Random(SEED)

    def grade(self, texts: Sequence[str], golds: Sequence[str]) -> list[Grade]:
        rewards = [float(self.random.random() < 0.5) for _ in texts]
        return [Grade(reward, "correct" if reward else "wrong") for reward in rewards]

    def close(self) -> None:
        pass
