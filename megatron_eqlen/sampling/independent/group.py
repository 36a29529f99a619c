"""Independent sampling, for the baselines: G completions of each prompt."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_eqlen.recipe import Recipe
from megatron_eqlen.sampling.harvester import RolloutHeader, RolloutPart
from megatron_eqlen.sampling.independent.record import join
from megatron_eqlen.sampling.track import Track
from megatron_eqlen.types import Group, Prompt, Routes, TokenIds


def harvesters(
    prompts: Sequence[Prompt], recipe: Recipe, eos_token_ids: frozenset[int], seed: int
) -> list[IndependentGroup]:
    """One for each prompt."""
    limit = recipe.rollout.max_response_length
    return [IndependentGroup(prompt, recipe.group_size, limit, eos_token_ids, seed) for prompt in prompts]


def open_share(group: Group, recipe: Recipe) -> float:
    """Of its completions, those that have not ended."""
    return 1 - len(group.completions) / recipe.group_size


class IndependentGroup:
    """Collects one prompt's completions."""

    index = 0

    def __init__(
        self, prompt: Prompt, group_size: int, limit: int, eos_token_ids: frozenset[int], seed: int
    ) -> None:
        self.prompt = prompt
        self.open = {
            number: Track(prompt, 0, number, [], limit, eos_token_ids, seed) for number in range(group_size)
        }
        self.parts: list[RolloutPart] = []
        self.prompt_routes: Routes | None = None

    @property
    def complete(self) -> bool:
        return not self.open

    def start(self) -> list[Track]:
        return list(self.open.values())

    def advance(self) -> list[Track]:
        self._end([number for number, track in self.open.items() if track.finish_reason is not None])
        return []

    def cut(self) -> None:
        self._end(list(self.open))

    def response(self, part: RolloutPart) -> TokenIds:
        return part.segment.token_ids

    def open_tracks(self) -> list[tuple[Track, int]]:
        return [(track, 0) for track in self.open.values()]

    def rollout(self, policy_version: int) -> Group:
        outcome = "suspended" if self.open else None
        return join(
            RolloutHeader(self.prompt, self.index, policy_version, outcome, self.prompt_routes), self.parts
        )

    def _end(self, numbers: list[int]) -> None:
        self.parts += [
            RolloutPart("completion", number, self.open.pop(number).segment(0)) for number in numbers
        ]
