"""Independent completions of each prompt: the baselines' sampling. A group of completions is a tree of depth
1."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_eqlen.recipe import Recipe
from megatron_eqlen.sampling.harvester import Marker
from megatron_eqlen.sampling.kind import plural
from megatron_eqlen.sampling.tree import GrowingTree, Shape, TreeSampling
from megatron_eqlen.types import Prompt, Rollout


class Group(GrowingTree):
    """Harvests the completions of one prompt."""

    kind = "independent"


class Independent(TreeSampling):
    """Groups of G completions, all compared with one another."""

    name = "independent"
    shares = False

    def harvesters(
        self,
        prompts: Sequence[Prompt],
        recipe: Recipe,
        eos_token_ids: frozenset[int],
        seed: int,
        marker: Marker | None = None,
    ) -> list[GrowingTree]:
        """Return one harvester for each prompt."""
        limit, shape = recipe.rollout.max_response_length, Shape(recipe.group_size)
        return [Group(prompt, limit, eos_token_ids, seed, shape) for prompt in prompts]

    def labels(self, rollout: Rollout) -> tuple[str, list[str]]:
        count = len(rollout.parts)
        return plural(count, "completion"), [f"completion {number}" for number in range(count)]


KIND = Independent()
