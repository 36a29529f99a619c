"""Tree sampling, for TreeRPO: every step of a response is continued several times.

    prompt ─► N steps ─► N steps after each ─► ... ─► depth steps (the last runs to the response limit)

A step ends at ``step_tokens`` (then it is continued, down to ``depth``) or at an end of sequence (then it is
a leaf). Steps are numbered as in an N-ary heap, so seeds do not depend on the order in which tokens arrive.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron_eqlen.recipe import Recipe
from megatron_eqlen.sampling.harvester import RolloutHeader, RolloutPart
from megatron_eqlen.sampling.track import Track
from megatron_eqlen.sampling.tree.record import join
from megatron_eqlen.types import Prompt, Routes, SampledTree, Segment, TokenIds, joined


def harvesters(
    prompts: Sequence[Prompt], recipe: Recipe, eos_token_ids: frozenset[int], seed: int
) -> list[TreeSampling]:
    """One for each prompt."""
    return [TreeSampling(prompt, recipe, eos_token_ids, seed) for prompt in prompts]


class TreeSampling:
    """Grows one prompt's tree."""

    index = 0

    def __init__(self, prompt: Prompt, recipe: Recipe, eos_token_ids: frozenset[int], seed: int) -> None:
        tree, self.limit = recipe.tree_sampling, recipe.rollout.max_response_length
        self.prompt, self.eos_token_ids, self.seed = prompt, eos_token_ids, seed
        self.branching, self.depth = tree.branching, tree.depth
        self.step_tokens = tree.step_tokens or max(1, self.limit // tree.depth)
        self.open: dict[int, Track] = {}
        self.parts: list[RolloutPart] = []
        self.prompt_routes: Routes | None = None

    @property
    def complete(self) -> bool:
        return not self.open

    def start(self) -> list[Track]:
        return self._continue(-1, [], depth=1)

    def advance(self) -> list[Track]:
        """Continue the steps that reached their length; a tree without open steps is complete."""
        launched: list[Track] = []
        for number in sorted(n for n, track in self.open.items() if track.finish_reason is not None):
            track = self.open.pop(number)
            step = self._add(number, track)
            response = track.path[len(self.prompt.token_ids) :]
            depth = self._depth(number)
            if track.finish_reason == "length" and depth < self.depth and len(response) < self.limit:
                step.finish_reason = None
                launched += self._continue(number, response, depth + 1)
        return launched

    def cut(self) -> None:
        for number, track in sorted(self.open.items()):
            if len(track):
                self._add(number, track)
        self.open.clear()

    def response(self, part: RolloutPart) -> TokenIds:
        before = next((one for one in self.parts if one.number == part.parent), None)
        above = [] if before is None else [self.response(before)]
        return joined([*above, part.segment.token_ids])

    def open_tracks(self) -> list[tuple[Track, int]]:
        return [(track, 0) for track in self.open.values()]

    def rollout(self, policy_version: int) -> SampledTree:
        outcome = "suspended" if self.open else None
        return join(
            RolloutHeader(self.prompt, self.index, policy_version, outcome, self.prompt_routes), self.parts
        )

    def _continue(self, parent: int, response: list[int], depth: int) -> list[Track]:
        room = self.limit - len(response)
        limit = room if depth == self.depth else min(self.step_tokens, room)
        first = (parent + 1) * self.branching
        for number in range(first, first + self.branching):
            self.open[number] = Track(self.prompt, 0, number, response, limit, self.eos_token_ids, self.seed)
        return [self.open[number] for number in range(first, first + self.branching)]

    def _parent(self, number: int) -> int:
        return number // self.branching - 1

    def _depth(self, number: int) -> int:
        return 1 if number < self.branching else 1 + self._depth(self._parent(number))

    def _add(self, number: int, track: Track) -> Segment:
        step = track.segment(0)
        self.parts.append(RolloutPart("step", number, step, self._parent(number)))
        return step
