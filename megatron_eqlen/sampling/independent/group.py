"""Independent sampling, for the baselines: G completions of each prompt."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_eqlen.recipe import Recipe
from megatron_eqlen.sampling.track import Track
from megatron_eqlen.types import Group, Prompt


def harvesters(
    prompts: Sequence[Prompt], recipe: Recipe, eos_token_ids: frozenset[int], seed: int
) -> list[IndependentGroup]:
    """One for each prompt."""
    limit = recipe.rollout.max_response_length
    return [IndependentGroup(prompt, recipe.group_size, limit, eos_token_ids, seed) for prompt in prompts]


class IndependentGroup:
    """Collects one prompt's completions."""

    index = 0

    def __init__(
        self, prompt: Prompt, group_size: int, limit: int, eos_token_ids: frozenset[int], seed: int
    ) -> None:
        self.prompt = prompt
        self.tracks = [
            Track(prompt, 0, number, [], limit, eos_token_ids, seed) for number in range(group_size)
        ]
        self.complete = False

    def start(self) -> list[Track]:
        return self.tracks

    def may_advance(self) -> bool:
        return all(track.finish_reason is not None for track in self.tracks)

    def advance(self) -> list[Track]:
        self.complete = self.may_advance()
        return []

    def cut(self) -> None:
        self.complete = True

    def rollout(self, policy_version: int) -> Group:
        return Group(
            prompt=self.prompt,
            policy_version=policy_version,
            completions=[track.segment(0) for track in self.tracks],
        )
