"""Trees of steps, each step continued several times: TreeRPO's sampling.

    prompt ─► N steps ─► N steps after each ─► ... ─► depth steps (the last runs to the response limit)

A step ends at ``step_tokens`` (then it is continued, down to ``depth``) or at an end of sequence (then it is
a leaf). Steps are numbered as in an N-ary heap, so seeds do not depend on the order in which tokens arrive.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from statistics import fmean

from megatron_eqlen.recipe import Recipe
from megatron_eqlen.sampling.comparison import (
    ComparisonUnit,
    Penalty,
    no_penalty,
    node,
    response_reward,
    root,
)
from megatron_eqlen.sampling.harvester import RolloutHeader, RolloutPart, in_order
from megatron_eqlen.sampling.independent import completion_metrics
from megatron_eqlen.sampling.kind import (
    LabeledSegment,
    Picture,
    PolicySample,
    SamplingKind,
    context_metrics,
    plural,
)
from megatron_eqlen.sampling.track import Track
from megatron_eqlen.tokens import TokenIds, Tokens, join
from megatron_eqlen.types import Metrics, Prompt, SampledTree, Segment, TokenTree


class TreeSampling(SamplingKind[SampledTree]):
    """Sampled trees; steps that continue the same step are compared. A tree's parts are its steps."""

    name = "tree"
    rollout_type = SampledTree

    def harvesters(
        self, prompts: Sequence[Prompt], recipe: Recipe, eos_token_ids: frozenset[int], seed: int
    ) -> list[GrowingTree]:
        """Return one harvester for each prompt."""
        return [GrowingTree(prompt, recipe, eos_token_ids, seed) for prompt in prompts]

    def parts(self, rollout: SampledTree) -> list[RolloutPart]:
        parents = [-1 if parent < 0 else rollout.numbers[parent] for parent in rollout.parents]
        return [
            RolloutPart("step", number, step, parent)
            for number, step, parent in zip(rollout.numbers, rollout.steps, parents, strict=True)
        ]

    def join(self, header: RolloutHeader, parts: Sequence[RolloutPart]) -> SampledTree:
        parts = in_order(parts)
        place = {part.number: i for i, part in enumerate(parts)}
        return SampledTree(
            prompt=header.prompt,
            policy_version=header.policy_version,
            steps=[part.segment for part in parts],
            parents=[place.get(part.parent, -1) for part in parts],
            index=header.index,
            numbers=list(place),
            prompt_columns=header.prompt_columns,
            suspended=header.outcome == "suspended",
        )

    def compare(
        self, rollout: SampledTree, recipe: Recipe, penalty: Penalty
    ) -> tuple[TokenTree, list[ComparisonUnit]]:
        """Return the tree as it was sampled, and a unit for each set of siblings, once the tree is
        complete."""
        nodes = [node(parent + 1, step) for parent, step in zip(rollout.parents, rollout.steps, strict=True)]
        rewards = step_rewards(rollout, penalty)
        units = [
            ComparisonUnit(
                rollout.prompt_id,
                [rollout.steps[i] for i in siblings],
                [nodes[i] for i in siblings],
                list(siblings.values()),
                skip_equal=False,
            )
            for siblings in _siblings(rollout, rewards)
            if not rollout.suspended
        ]
        return TokenTree(rollout.prompt_id, [root(rollout), *nodes]), units

    def picture(self, rollout: SampledTree) -> Picture:
        segments: list[LabeledSegment] = []
        for number, (step, parent) in enumerate(zip(rollout.steps, rollout.parents, strict=True)):
            label = f"step {number}" + (f" after step {parent}" if parent >= 0 else "")
            segments.append(LabeledSegment(label, step, rollout.response(parent)))
        return Picture(f"tree of {plural(len(segments), 'step')}", segments=segments)

    def harvest_metrics(self, rollouts: Sequence[SampledTree]) -> Metrics:
        """Return the metrics of completions; each step counts as one."""
        steps = [step for tree in rollouts for step in tree.steps]
        branches = sum(parent >= 0 for tree in rollouts for parent in tree.parents)
        return completion_metrics(steps) | context_metrics(rollouts, map(_starts, rollouts), branches)

    def policy_samples(self, rollout: SampledTree) -> Iterator[PolicySample]:
        """Yield every whole response. Steps that continue the same step share its weight equally."""
        siblings = Counter(rollout.parents)
        weights: list[float] = []
        for step, parent, start in zip(rollout.steps, rollout.parents, _starts(rollout), strict=True):
            weights.append((weights[parent] if parent >= 0 else 1.0) / siblings[parent])
            if step.finish_reason is not None:
                reward = response_reward(step, rollout.prompt_id)
                yield PolicySample(weights[-1], start + len(step), reward)


KIND = TreeSampling()


def step_rewards(tree: SampledTree, penalty: Penalty = no_penalty) -> list[float | None]:
    """Return TreeRPO's reward of each step: a leaf's is that of its response, an inner step's the mean of the
    steps that continue it.

    None for a step that the token budget cut off and that no step with a reward continues.
    """
    below: list[list[float]] = [[] for _ in tree.steps]
    rewards: list[float | None] = [None] * len(tree.steps)
    for i in reversed(range(len(tree.steps))):
        value = None
        if tree.steps[i].finish_reason is not None:
            value = response_reward(tree.steps[i], tree.prompt_id)
            value += penalty(sum(map(len, tree.path(i))), tree.steps[i].finish_reason)
        elif below[i]:
            value = fmean(below[i])
        rewards[i] = value
        if tree.parents[i] >= 0 and value is not None:
            below[tree.parents[i]].append(value)
    return rewards


def _siblings(tree: SampledTree, rewards: list[float | None]) -> list[dict[int, float]]:
    """Return, for each step that was continued, its continuations that have a reward: index in ``tree.steps``
    to reward."""
    children: dict[int, dict[int, float]] = {}
    for i, (parent, value) in enumerate(zip(tree.parents, rewards, strict=True)):
        if value is not None:
            children.setdefault(parent, {})[i] = value
    return list(children.values())


def _starts(tree: SampledTree) -> list[int]:
    """Return the number of tokens between the prompt and each step."""
    ends: list[int] = []
    starts: list[int] = []
    for step, parent in zip(tree.steps, tree.parents, strict=True):
        starts.append(ends[parent] if parent >= 0 else 0)
        ends.append(starts[-1] + len(step))
    return starts


class GrowingTree:
    """Harvests the tree of one prompt."""

    index = 0

    def __init__(self, prompt: Prompt, recipe: Recipe, eos_token_ids: frozenset[int], seed: int) -> None:
        tree, self.limit = recipe.tree_sampling, recipe.rollout.max_response_length
        self.prompt, self.eos_token_ids, self.seed = prompt, eos_token_ids, seed
        self.branching, self.depth = tree.branching, tree.depth
        self.step_tokens = tree.step_tokens or max(1, self.limit // tree.depth)
        self.open: dict[int, Track] = {}
        self.parts: list[RolloutPart] = []
        self.prompt_columns: Tokens | None = None

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
        before = next((step for step in self.parts if step.number == part.parent), None)
        above = [] if before is None else [self.response(before)]
        return join([*above, part.segment.token_ids])

    def parts_along(self, track: Track) -> Iterator[tuple[int, RolloutPart, int]]:
        above, number = [-1], int(track.name.rpartition("/")[2])
        while (number := self._parent(number)) >= 0:
            above.append(number)
        ends = {-1: 0}
        for part in sorted(self.parts, key=lambda part: part.number):  # a step comes after its parent
            if part.parent in above:
                start, on_path = ends[part.parent], part.number in above
                ends[part.number] = start + len(part.segment)
                yield start, part, len(part.segment) if on_path else 1

    def rollout(self, policy_version: int) -> SampledTree:
        outcome = "suspended" if self.open else None
        header = RolloutHeader(self.prompt, self.index, policy_version, outcome, self.prompt_columns)
        return KIND.join(header, self.parts)

    def _continue(self, parent: int, response: list[int], depth: int) -> list[Track]:
        """Open the steps that continue step ``parent``, after the tokens of ``response``."""
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
