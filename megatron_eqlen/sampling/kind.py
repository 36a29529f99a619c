"""Sampling kinds: how rollouts are generated, compared and counted.

tokens ─Harvester─► rollout ─compare─► token tree and comparison units (objectives weigh them)
                       ├───labels────► its parts as people see them
                       └─────────────► harvest/... and objective/... metrics
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from megatron_eqlen.recipe import Recipe
from megatron_eqlen.sampling.comparison import ComparisonUnit, Penalty
from megatron_eqlen.sampling.harvester import Harvester, Setting
from megatron_eqlen.types import Metrics, Prompt, Rollout, TokenTree


class SamplingKind(ABC):
    """One value of the recipe's ``sampling``. ``PlacedTrees`` and ``ProbeSampling`` alone have a state."""

    name: ClassVar[str]
    """Value of the recipe's key, and ``Rollout.kind``."""

    def harvesters(self, prompts: Sequence[Prompt], setting: Setting) -> list[Harvester]:
        """Return a harvester for each rollout of ``prompts``, those of a prompt next to each other."""
        numbers = range(setting.recipe.rollouts_per_prompt)
        return [self.harvester(prompt, number, setting) for prompt in prompts for number in numbers]

    @abstractmethod
    def harvester(self, prompt: Prompt, index: int, setting: Setting) -> Harvester:
        """Return the harvester of rollout ``index`` of ``prompt``, below ``Recipe.rollouts_per_prompt``."""

    @abstractmethod
    def compare(
        self, rollout: Rollout, recipe: Recipe, penalty: Penalty
    ) -> tuple[TokenTree, list[ComparisonUnit]]:
        """Return the token tree of a scored, complete rollout, and the comparison units over its nodes.
        ``penalty`` depends on the response's length."""

    @abstractmethod
    def labels(self, rollout: Rollout) -> tuple[str, list[str]]:
        """Return a title of a rollout, perhaps suspended, and a label of each part, for pages."""

    @abstractmethod
    def harvest_metrics(self, rollouts: Sequence[Rollout]) -> Metrics:
        """Return ``harvest/...`` metrics of at least one rollout: numbers, lengths, outcomes."""

    def objective_metrics(
        self, units: Sequence[ComparisonUnit], rollouts: Sequence[Rollout], recipe: Recipe
    ) -> Metrics:
        """Return the ``objective/...`` metrics of a step that only this kind has; none by default."""
        return {}


# ---- helpers for kinds -----------------------------------------------------------------------------------


def plural(number: int, noun: str) -> str:
    """Return ``1 pair``, ``2 pairs``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
