"""Probes: recorded rollouts, continued again at chosen places.

    prompt ─┬─ piece 0 ─┬─ piece 1 ─── the recorded parts, cut at the places
            ├─ probe    ├─ probe
            ├─ probe    └─ probe       ``samples`` continuations of each place, behind forced tokens if any

The continuations of a place are independent of each other and of what was recorded behind it: the mean of
their rewards is an unbiased estimate of the place's value under the weights that continue it.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from megatron_eqlen.sampling.comparison import response_reward
from megatron_eqlen.sampling.harvester import Harvester, Setting
from megatron_eqlen.sampling.track import Track
from megatron_eqlen.sampling.tree import TreeSampling
from megatron_eqlen.tokens import GIVEN, Tokens
from megatron_eqlen.types import Line, Part, Prompt, Rollout, RolloutKey, tokens_along

PROBE = "probe"
"""Role of the parts that continue a place."""
FORCED = "forced"
"""Role of the parts that put given tokens behind a place."""
FIRST_TRACK, TRACKS = 1 << 30, 1 << 20
"""First number of a probe's tracks, and how many each seed has: draws differ from all that a harvest made."""
SEEDS = 1 << 10

Place = tuple[int, int]
"""A place: the number of its part, and the response's generated tokens before it. The prompt: (-1, 0)."""


class Probed(Harvester):
    """Continues one recorded rollout at each of its places."""

    def __init__(self, rollout: Rollout, probe: ProbeSampling, setting: Setting) -> None:
        super().__init__(rollout.prompt, rollout.index, setting)
        # whatever was sampled, continuations make a tree
        self.kind, self.limit = probe.name, self.limit - len(probe.forced)
        self.places = self._cut(rollout, probe.places[rollout.key])
        """Numbers of the parts before each place, in the order of ``sorted(places)``; -1 for the prompt."""
        if probe.forced:
            # forced tokens are parts of their own behind each place, marked as not generated
            given = {GIVEN.name: [(-1,)] * len(probe.forced), "versions": rollout.policy_version}
            tokens, first = Tokens.of(probe.forced, 0.0, **given), len(self.parts)
            for number, place in enumerate(self.places, first):
                self.parts.append(Part(tokens, role=FORCED, number=number, parent=place, carried=True))
            self.places = range(first, len(self.parts))
        self.samples, self.first_track = probe.samples, FIRST_TRACK + probe.seed * TRACKS
        self.recorded = len(self.parts)

    def _cut(self, rollout: Rollout, places: Collection[Place]) -> Sequence[int]:
        """Take over the rollout's parts, cut at ``places``, graded as they were; return ``self.places``."""
        last, ends, found = {-1: -1}, rollout.ends(), [-1] * ((-1, 0) in places)
        for part in rollout.parts:
            # [generated + 1] place in `tokens` of each generated token, and the end
            own = [*np.flatnonzero(part.tokens.is_generated).tolist(), len(part.tokens)]
            # a place is behind what an environment answered
            cuts = {own[length - ends[part.parent]] for number, length in places if number == part.number}
            start, parent, role = 0, last[part.parent], f"piece of {part.number}"
            for stop in sorted(cuts | {len(part.tokens)}):
                # only the last piece has the part's end
                end = {} if stop == len(part.tokens) else {"finish_reason": None, "grade": None}
                piece = {"tokens": part.tokens[start:stop], "number": len(self.parts), "parent": parent}
                self.parts.append(replace(part, role=role, carried=True, **piece, **end))
                start, parent = stop, len(self.parts) - 1
                if stop in cuts:
                    found.append(parent)
            # children of the part continue its last piece
            last[part.number] = parent
        return found

    def start(self) -> list[Track]:
        launched: list[Track] = []
        for place in self.places:
            line = self.line(place)
            response, limit = tokens_along(line).tolist(), self.limit - sum(map(len, line))
            for _ in range(self.samples):
                launched.append(self.open_track(self.first_track + len(launched), response, limit, place))
        return launched

    def advance(self) -> list[Track]:
        for track in [track for track in self.open.values() if track.finish_reason is not None]:
            self.add_part(track, PROBE, self.recorded + track.number - self.first_track)
            del self.open[track.number]
        if not self.open:
            self.outcome = "complete"
        return []

    def cut(self) -> None:
        raise AssertionError("a probe has no budget of tokens")


@dataclass(frozen=True, eq=False)
class ProbeSampling(TreeSampling):
    """Continues some rollouts of a record. Unlike the kinds of recipes, it has a state: what it continues."""

    rollouts: Sequence[Rollout]
    """All of the step, in training order."""
    responses: Sequence[tuple[Rollout, Line]]
    """Responses whose places are continued, in the same order."""
    places: Mapping[RolloutKey, Mapping[Place, int]]
    """By rollout, with the tokens that a continuation of a place is expected to have."""
    samples: int
    """Continuations of a place."""
    seed: int
    """Below ``SEEDS``; another one gives other draws."""
    forced: Sequence[int] = ()
    """Token ids before each continuation, which count in its length."""

    @property
    def prompts(self) -> list[Prompt]:
        """The prompts of what it continues, in the order in which they were drawn."""
        continued = [rollout for rollout in self.rollouts if rollout.key in self.places]
        return [*{rollout.prompt_id: rollout.prompt for rollout in continued}.values()]

    def harvesters(self, prompts: Sequence[Prompt], setting: Setting) -> list[Harvester]:
        asked, by_key = {prompt.prompt_id for prompt in prompts}, {r.key: r for r in self.rollouts}
        return [Probed(by_key[key], self, setting) for key in self.places if key[0] in asked]

    def rewards(self, probed: Rollout, unscored_too: bool) -> dict[Place, np.ndarray]:
        """Return the rewards of each place's continuations, along each line in the order of the places. What
        has no reward is left out, or with ``unscored_too`` counts as its 0."""
        left_out = () if unscored_too else {part.number for part in probed.unscored()}
        parts, places = probed.with_role(PROBE), sorted(self.places[probed.key])
        found = dict[Place, np.ndarray]()
        # continuations were launched place by place, `samples` each, and parts are in that order
        for place, of_place in zip(places, itertools.batched(parts, self.samples), strict=True):
            graded = [part for part in of_place if part.number not in left_out]
            found[place] = np.array([response_reward(part, probed.prompt_id) for part in graded])
        return found
