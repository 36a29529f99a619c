"""Forks where earlier steps showed that they pay (``tree_sampling.fork: profile``).

    trees of a step ─learn─► newest trees that forked at each place ─decide─► places of the next step's forks

Each source of prompts has places of its own. Most trees fork where the profile of earlier ones is sure that a
fork pays, and nowhere until it is; the others try a place with two lines. Earlier steps and the prompt's name
decide this, never tokens of the step, so the weights of lines are unbiased (docs/length_bias.md).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from megatron_eqlen.recipe import Recipe
from megatron_eqlen.sampling.harvester import Setting
from megatron_eqlen.sampling.profile import Profile, by_rank, profile_of
from megatron_eqlen.sampling.track import track_seed
from megatron_eqlen.sampling.tree import GrowingTree, Shape, TreeSampling, after_marker, every, step_tokens
from megatron_eqlen.types import Prompt, Rollout

KEPT, LEAST = 64, 16
"""Newest trees that are known of each place, and fewest that decide."""
TRIED, WATCHED = 4, 1
"""Trees of 16 that try a place, while fewer than ``KEPT`` are known of it and from then on."""

Places = Sequence[Sequence[Sequence[Sequence[float]]]]
"""By place: ``by_rank`` of each tree that forked there, ranks 0 and 1, as lists. Never changed in place."""


class Rule(NamedTuple):
    """Decision for the prompts of a source."""

    tried: Sequence[int]
    """Trees of 16 that try each place."""
    fork: tuple[int, int] = 0, 1
    """Place of the other trees' forks, and their number of lines; 1: none."""
    profile: Profile | None = None

    def __str__(self) -> str:
        if self.profile is None:
            return "none, as they are not seen to pay any more"
        place = f"{self.profile.lines} lines at {self.profile.place:.0%} of a response"
        return f"{place}, which give about {self.profile.gain} signal per token"


class PlacedTrees(TreeSampling):
    """Trees of a run whose forks are placed by what the run has shown. Unlike other kinds it has a state."""

    def __init__(self, recipe: Recipe) -> None:
        tree = recipe.tree_sampling
        by_length = [step_tokens(recipe) * number for number in range(1, tree.forks + 1)]
        self.places = by_length if tree.step_tokens or not tree.marker else []
        """Tokens of a response before each place; the marker, if there is one, is the last place."""
        self.count, self.most = len(self.places) + bool(tree.marker), tree.branching
        self.seen: Mapping[str, Places] = {}
        """Trees of all steps so far, by source: the state that a checkpoint keeps."""
        self.rules: dict[str, Rule] = {}
        """Decisions for the step, by source."""

    def decide(self) -> list[str]:
        """Place the next step's forks, and return a sentence for each source whose forks move."""
        before, self.rules = self.rules, {source: self._rule(seen) for source, seen in self.seen.items()}
        # a source without a rule does not fork
        moved = [s for s, rule in self.rules.items() if rule.fork != before.get(s, Rule(())).fork]
        return [f"forks of {source}: {self.rules[source]}" for source in moved]

    def harvester(self, prompt: Prompt, index: int, setting: Setting) -> GrowingTree:
        place, lines = self._fork(prompt, index, setting.seed)
        # with one fork of a line, `every` forks it at this place alone
        search = every(self.places[place]) if place < len(self.places) else after_marker(setting.marker)
        shape = Shape(setting.recipe.group_size, lines, int(lines > 1), "step")
        return GrowingTree(prompt, index, setting, shape, search)

    def learn(self, rollouts: Sequence[Rollout], seed: int) -> None:
        """Add a step's complete, scored trees. ``seed``: that of their harvest."""
        seen = {source: list(places) for source, places in self.seen.items()}
        for rollout in rollouts:
            place, lines = self._fork(rollout.prompt, rollout.index, seed)
            places = seen.setdefault(rollout.prompt.source, [()] * self.count)
            if lines > 1:
                places[place] = [*places[place], by_rank(rollout)[:2].tolist()][-KEPT:]
        self.seen = seen

    def _fork(self, prompt: Prompt, index: int, seed: int) -> tuple[int, int]:
        """Return the place of a tree's forks, and their number of lines; 1: it does not fork."""
        # the tree's own hash draws its place, and whether it tries that place: same on every machine
        draw, place = divmod(track_seed(seed, prompt.prompt_id, index, -1), self.count)
        rule = self.rules.get(prompt.source, Rule([TRIED] * self.count))
        return (place, 2) if draw % 16 < rule.tried[place] else rule.fork

    def _rule(self, seen: Places) -> Rule:
        tried = [TRIED if len(trees) < KEPT else WATCHED for trees in seen]
        best = Rule(tried)
        for place, trees in enumerate(seen):
            # a fork must pay for certain, and more certainly than the best place so far
            least = best.profile.gain.low if best.profile else 1.0
            profile = profile_of(np.reshape(trees, (-1, 2, 3)), len(trees), self.most)
            if profile and len(trees) >= LEAST and profile.gain.low > least:
                best = Rule(tried, (place, profile.lines), profile)
        return best
