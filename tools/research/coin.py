"""Graders that flip coins: rewards know nothing of a response, or only its length.

What a run with ``Coin`` changes (length, entropy, accuracy) is drift of the method, not learning. With
``LongerPays`` and ``ShorterPays`` the sign of what there is to learn is known.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

from megatron_eqlen.recipe import RewardRecipe
from megatron_eqlen.types import Grade

EVEN = 200
"""Characters of a response whose coin is fair with ``LongerPays`` and ``ShorterPays``."""


class Coin:
    """Flips a coin for each response, other ones in each run, and another one where a text comes again: a
    policy cannot learn which of them are lucky."""

    def __init__(self, settings: RewardRecipe, seed: int) -> None:
        self.seed = seed
        self.seen: Counter[tuple[str, str]] = Counter()

    def chance(self, length: int) -> float:
        """Return the probability of reward 1 for a response of ``length`` characters."""
        return 0.5

    def grade(self, texts: Sequence[str], golds: Sequence[str]) -> list[Grade]:
        return [self._flip(text, gold) for text, gold in zip(texts, golds, strict=True)]

    def _flip(self, text: str, gold: str) -> Grade:
        self.seen[text, gold] += 1
        draw = random.Random(f"{self.seed}/{self.seen[text, gold]}/{gold}/{text}").random()
        reward = float(draw < self.chance(len(text)))
        return Grade(reward, "correct" if reward else "wrong")

    def close(self) -> None:
        pass


class LongerPays(Coin):
    def chance(self, length: int) -> float:
        return length / (length + EVEN)


class ShorterPays(Coin):
    def chance(self, length: int) -> float:
        return EVEN / (length + EVEN)
