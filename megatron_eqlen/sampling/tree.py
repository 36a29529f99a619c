"""Trees of steps, each step continued several times: TreeRPO's sampling.

    prompt ─► N steps ─► N steps after each ─► ... ─► depth steps (the last runs to the response limit)

A step ends at ``step_tokens`` (then it is continued, down to ``depth``) or at an end of sequence (then it is
a leaf). Steps are numbered as in an N-ary heap, so seeds do not depend on the order in which tokens arrive.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from statistics import fmean

from megatron_eqlen.metrics import (
    HARVEST_RESPONSE_LENGTH,
    HARVEST_SUPERVISED_TOKENS,
    HARVEST_TRUNCATED_FRACTION,
)
from megatron_eqlen.recipe import Recipe
from megatron_eqlen.sampling.comparison import (
    ComparisonUnit,
    Penalty,
    no_penalty,
    response_reward,
    token_tree,
)
from megatron_eqlen.sampling.harvester import Harvester
from megatron_eqlen.sampling.kind import SamplingKind, context_metrics, plural
from megatron_eqlen.sampling.track import Track
from megatron_eqlen.types import Metrics, Part, Prompt, Rollout, TokenTree


class TreeSampling(SamplingKind):
    """Sampled trees; steps that continue the same step are compared."""

    name = "tree"

    def harvesters(
        self, prompts: Sequence[Prompt], recipe: Recipe, eos_token_ids: frozenset[int], seed: int
    ) -> list[GrowingTree]:
        """Return one harvester for each prompt."""
        tree, limit = recipe.tree_sampling, recipe.rollout.max_response_length
        step_tokens = tree.step_tokens or max(1, limit // tree.depth)
        return [
            GrowingTree(prompt, limit, eos_token_ids, seed, tree.branching, tree.depth, step_tokens)
            for prompt in prompts
        ]

    def compare(
        self, rollout: Rollout, recipe: Recipe, penalty: Penalty
    ) -> tuple[TokenTree, list[ComparisonUnit]]:
        """Return the tree as it was sampled, without steps whose reward is not known, and a unit for each set
        of siblings, once the tree is complete."""
        rewards = step_rewards(rollout, penalty)
        parts = [part for part in rollout.parts if part.number in rewards]
        tree, nodes = token_tree(rollout, rollout.prompt_id, parts)
        siblings: dict[int, list[Part]] = defaultdict(list)
        for part in parts:
            siblings[part.parent].append(part)
        units = [
            ComparisonUnit(
                rollout.prompt_id,
                members,
                [nodes[part.number] for part in members],
                [rewards[part.number] for part in members],
                skip_equal=False,
            )
            for members in siblings.values()
            if not rollout.suspended
        ]
        return tree, units

    def labels(self, rollout: Rollout) -> tuple[str, list[str]]:
        places = {part.number: place for place, part in enumerate(rollout.parts)}
        labels = [
            f"step {place}" + (f" after step {places[part.parent]}" if part.parent >= 0 else "")
            for place, part in enumerate(rollout.parts)
        ]
        return f"tree of {plural(len(labels), 'step')}", labels

    def harvest_metrics(self, rollouts: Sequence[Rollout]) -> Metrics:
        """Return the number of completions (each step counts as one), their lengths, and why they ended."""
        parts = [part for rollout in rollouts for part in rollout.parts]
        lengths = [len(part) for part in parts]
        reasons = Counter(part.finish_reason for part in parts)
        return {
            "harvest/completions": len(parts),
            HARVEST_SUPERVISED_TOKENS: sum(lengths),
            HARVEST_RESPONSE_LENGTH: fmean(lengths),
            "harvest/response_length_max": max(lengths),
            HARVEST_TRUNCATED_FRACTION: reasons["length"] / len(parts),
            "harvest/budget_fraction": reasons[None] / len(parts),
        } | context_metrics(rollouts, branches=sum(part.parent >= 0 for part in parts))


KIND = TreeSampling()


def step_rewards(tree: Rollout, penalty: Penalty = no_penalty) -> dict[int, float]:
    """Return TreeRPO's reward of each step, by its number: a leaf's is that of its response, an inner step's
    the mean of the steps that continue it.

    A step that the token budget cut off, and that no step with a reward continues, has none.
    """
    ends, rewards = tree.ends(), dict[int, float]()
    below: dict[int, list[float]] = defaultdict(list)
    for part in reversed(tree.parts):
        if part.finish_reason is not None:
            reward = response_reward(part, tree.prompt_id) + penalty(ends[part.number], part.finish_reason)
        elif part.number in below:
            reward = fmean(below[part.number])
        else:
            continue
        rewards[part.number] = reward
        below[part.parent].append(reward)
    return rewards


class GrowingTree(Harvester):
    """Harvests the tree of one prompt."""

    kind, role = "tree", "step"

    def __init__(
        self,
        prompt: Prompt,
        limit: int,
        eos_token_ids: frozenset[int],
        seed: int,
        branching: int,
        depth: int,
        step_tokens: int,
    ) -> None:
        super().__init__(prompt, 0, limit, eos_token_ids, seed)
        self.branching, self.depth, self.step_tokens = branching, depth, step_tokens

    def start(self) -> list[Track]:
        return self._continue(-1, [], depth=1)

    def advance(self) -> list[Track]:
        """Continue the steps that reached their length; a tree without open steps is complete."""
        launched: list[Track] = []
        for number in sorted(n for n, track in self.open.items() if track.finish_reason is not None):
            track = self.open.pop(number)
            step = self.add_part(track, self.role, number)
            response = track.path[len(self.prompt.token_ids) :]
            depth = self._depth(number)
            if track.finish_reason == "length" and depth < self.depth and len(response) < self.limit:
                step.finish_reason = None
                launched += self._continue(number, response, depth + 1)
        if not self.open:
            self.outcome = "complete"
        return launched

    def cut(self) -> None:
        for number, track in sorted(self.open.items()):
            if len(track) or self.depth == 1:  # a group has all its completions
                self.add_part(track, self.role, number)
        self.open.clear()
        self.outcome = "budget"

    def _continue(self, parent: int, response: list[int], depth: int) -> list[Track]:
        """Open the steps that continue step ``parent``, after the tokens of ``response``."""
        room = self.limit - len(response)
        limit = room if depth == self.depth else min(self.step_tokens, room)
        first = (parent + 1) * self.branching
        return [
            self.open_track(number, response, limit, parent)
            for number in range(first, first + self.branching)
        ]

    def _depth(self, number: int) -> int:
        return 1 if number < self.branching else 1 + self._depth(number // self.branching - 1)
