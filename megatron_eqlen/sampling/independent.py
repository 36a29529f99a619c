"""Independent completions of each prompt: the baselines' sampling. A group of completions is a tree of depth
1."""

from __future__ import annotations

from megatron_eqlen.sampling.kind import Setting, plural
from megatron_eqlen.sampling.tree import GrowingTree, Shape, TreeSampling
from megatron_eqlen.types import Prompt, Rollout


class Group(GrowingTree):
    """Harvests the completions of one prompt."""

    kind = "independent"


class Independent(TreeSampling):
    """Groups of G completions, all compared with one another."""

    name = "independent"
    shares = False

    def harvester(self, prompt: Prompt, index: int, setting: Setting) -> GrowingTree:
        recipe, shape = setting.recipe, Shape(setting.recipe.group_size)
        limit = recipe.rollout.max_response_length
        return Group(prompt, limit, setting.eos_token_ids, setting.seed, shape)

    def labels(self, rollout: Rollout) -> tuple[str, list[str]]:
        count = len(rollout.parts)
        return plural(count, "completion"), [f"completion {number}" for number in range(count)]


KIND = Independent()
