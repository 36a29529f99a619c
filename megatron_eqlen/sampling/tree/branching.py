"""Tree sampling, for TreeRPO: every step of a response is continued several times.

    prompt ─► N steps ─► N steps after each ─► ... ─► depth steps (the last runs to the response limit)

A step ends at ``step_tokens`` (then it is continued, down to ``depth``) or at an end of sequence (then it is
a leaf). Steps are numbered as in an N-ary heap, so seeds do not depend on the order in which tokens arrive.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron_eqlen.recipe import Recipe
from megatron_eqlen.sampling.track import Track
from megatron_eqlen.types import Prompt, SampledTree, Segment


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
        self.tracks: dict[int, Track] = {}
        self.open: set[int] = set()
        self.continued: set[int] = set()
        self.complete = False

    def start(self) -> list[Track]:
        return self._continue(-1, [], depth=1)

    def may_advance(self) -> bool:
        return any(self.tracks[number].finish_reason is not None for number in self.open)

    def advance(self) -> list[Track]:
        """Continue the steps that reached their length; a tree without open steps is complete."""
        launched: list[Track] = []
        for number in sorted(n for n in self.open if self.tracks[n].finish_reason is not None):
            self.open.remove(number)
            track = self.tracks[number]
            response = track.path[len(self.prompt.token_ids) :]
            depth = self._depth(number)
            if track.finish_reason == "length" and depth < self.depth and len(response) < self.limit:
                self.continued.add(number)
                launched += self._continue(number, response, depth + 1)
        self.complete = not self.open
        return launched

    def cut(self) -> None:
        self.complete = True

    def rollout(self, policy_version: int) -> SampledTree:
        order = sorted(number for number, track in self.tracks.items() if len(track))
        place = {number: i for i, number in enumerate(order)}
        return SampledTree(
            prompt=self.prompt,
            policy_version=policy_version,
            steps=[self._step(number) for number in order],
            parents=[place.get(self._parent(number), -1) for number in order],
        )

    def _continue(self, parent: int, response: list[int], depth: int) -> list[Track]:
        room = self.limit - len(response)
        limit = room if depth == self.depth else min(self.step_tokens, room)
        first = (parent + 1) * self.branching
        for number in range(first, first + self.branching):
            self.tracks[number] = Track(
                self.prompt, 0, number, response, limit, self.eos_token_ids, self.seed
            )
            self.open.add(number)
        return [self.tracks[number] for number in range(first, first + self.branching)]

    def _parent(self, number: int) -> int:
        return number // self.branching - 1

    def _depth(self, number: int) -> int:
        return 1 if number < self.branching else 1 + self._depth(self._parent(number))

    def _step(self, number: int) -> Segment:
        step = self.tracks[number].segment(0)
        if number in self.continued:
            step.finish_reason = None
        return step
