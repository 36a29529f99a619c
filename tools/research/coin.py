"""Graders that flip coins: rewards know nothing of a response, or only its length.

What a run with ``Coin`` changes (length, entropy, accuracy) is drift of the method, not learning. With
``LongerPays`` and ``ShorterPays`` the sign of what there is to learn is known.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from megatron_eqlen.recipe import RewardRecipe
from megatron_eqlen.types import Grade

SEED = 0
EVEN = 200
"""Characters of a response whose coin is fair with ``LongerPays`` and ``ShorterPays``."""


class Coin:
    """Flips one coin for each response, in the order in which responses are graded.

    The flips do not depend on texts: a policy cannot learn which of them are lucky.
    """

    def __init__(self, settings: RewardRecipe) -> None:
        self.random = random.Random(SEED)

    def chance(self, length: int) -> float:
        """Return the probability of reward 1 for a response of ``length`` characters."""
        return 0.5

    def grade(self, texts: Sequence[str], golds: Sequence[str]) -> list[Grade]:
        rewards = [float(self.random.random() < self.chance(len(text))) for text in texts]
        return [Grade(reward, "correct" if reward else "wrong") for reward in rewards]

    def close(self) -> None:
        pass


class LongerPays(Coin):
    def chance(self, length: int) -> float:
        return length / (length + EVEN)


class ShorterPays(Coin):
    def chance(self, length: int) -> float:
        return EVEN / (length + EVEN)
