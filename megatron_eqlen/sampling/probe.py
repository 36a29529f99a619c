"""Probes: recorded rollouts, continued anew at chosen places.

    prompt ─┬─ piece 0 ─┬─ piece 1 ─── the recorded parts, cut at the places
            ├─ probe    ├─ probe
            ├─ probe    └─ probe       ``samples`` continuations of each place, behind forced tokens if any

The continuations of a place are independent of each other and of what was recorded behind it, so the mean of
their rewards is an unbiased estimate of the place's value under the weights that continue it.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from megatron_eqlen.sampling.harvester import Harvester
from megatron_eqlen.sampling.kind import Setting
from megatron_eqlen.sampling.track import Track
from megatron_eqlen.sampling.tree import TreeSampling
from megatron_eqlen.tokens import GIVEN, Tokens
from megatron_eqlen.types import Part, Prompt, Rollout, RolloutKey, rollout_key, tokens_along

PROBE = "probe"
"""Role of the parts that continue a place."""
PIECE = "piece of "
"""Role of the pieces of a recorded part, before its number."""
FORCED = "forced"
"""Role of the parts that put given tokens behind a place."""
FIRST_TRACK, TRACKS = 1 << 30, 1 << 20
"""Numbers of tracks from the first on belong to probes: their draws differ from all that a harvest made. Each
seed of a probe has so many."""
SEEDS = 1 << 10

Places = Mapping[int, Sequence[int]]
"""By the number of a part: after how many of its generated tokens it is continued, ascending, at least 1. Of
-1, the prompt: ``[0]`` if it is."""


def cut_at(rollout: Rollout, places: Places, forced: Sequence[int] = ()) -> tuple[list[Part], dict[int, int]]:
    """Return the rollout's parts cut at ``places``, numbered anew, graded as they were, and how many tokens
    of a response lie before its continuation at each place, by the number of the part that it continues (-1:
    the prompt). With ``forced`` token ids that is a part of these."""
    pieces: list[Part] = []
    last, ends = {-1: -1}, {-1: 0}
    found = dict.fromkeys([-1] * bool(places.get(-1)), 0)
    for part in rollout.parts:
        own = np.flatnonzero(part.tokens.is_generated)
        stops = [stop for stop in places.get(part.number, ()) if stop < len(own)]
        # a place is behind what an environment answered
        bounds = [0, *(int(own[stop]) for stop in stops), len(part.tokens)]
        parent = last[part.parent]
        for start, stop in itertools.pairwise(bounds):
            end = stop == len(part.tokens)
            pieces.append(
                replace(
                    part,
                    tokens=part.tokens[start:stop],
                    finish_reason=part.finish_reason if end else None,
                    grade=part.grade if end else None,
                    role=f"{PIECE}{part.number}",
                    number=len(pieces),
                    parent=parent,
                    carried=True,
                )
            )
            parent = pieces[-1].number
        begin = len(pieces) - len(stops) - 1
        found |= {begin + place: ends[part.parent] + stop for place, stop in enumerate(stops)}
        last[part.number], ends[part.number] = parent, ends[part.parent] + len(part)
        if len(own) in places.get(part.number, ()):  # where other parts continue it
            found[parent] = ends[part.number]
    if not forced:
        return pieces, found
    given = Tokens.of(forced, 0.0, versions=rollout.policy_version, **{GIVEN.name: [(-1,)] * len(forced)})
    marks = [
        Part(given, role=FORCED, number=number, parent=place, carried=True)
        for number, place in enumerate(found, len(pieces))
    ]
    lengths = (length + len(forced) for length in found.values())
    return pieces + marks, dict(zip([mark.number for mark in marks], lengths, strict=True))


class Probed(Harvester):
    """Continues one recorded rollout ``samples`` times at each of its places."""

    kind = "tree"

    def __init__(self, rollout: Rollout, of: ProbeSampling, setting: Setting) -> None:
        limit = setting.recipe.rollout.max_response_length
        super().__init__(rollout.prompt, rollout.index, limit, setting.eos_token_ids, setting.seed)
        self.parts, self.places = cut_at(rollout, of.places[rollout_key(rollout)], of.forced)
        self.samples, self.first_track = of.samples, of.first_track
        self.recorded = len(self.parts)

    def start(self) -> list[Track]:
        launched: list[Track] = []
        for place, length in self.places.items():
            response = tokens_along(self.line(place)).tolist()
            for _ in range(self.samples):
                number = self.first_track + len(launched)
                launched.append(self.open_track(number, response, self.limit - length, place))
        return launched

    def advance(self) -> list[Track]:
        """Make each continuation that has ended a part."""
        for track in [track for track in self.open.values() if track.finish_reason is not None]:
            self.add_part(track, PROBE, self.recorded + track.number - self.first_track)
            del self.open[track.number]
        if not self.open:
            self.outcome = "complete"
        return []

    def cut(self) -> None:
        raise AssertionError("a probe has no budget of tokens")


class ProbeSampling(TreeSampling):
    """Continues some rollouts of a record. Unlike the kinds of recipes, it has a state: what it continues."""

    def __init__(
        self,
        rollouts: Sequence[Rollout],
        places: Mapping[RolloutKey, Places],
        samples: int,
        seed: int,
        forced: Sequence[int] = (),
    ) -> None:
        """``seed``: below ``SEEDS``; another one gives other draws. ``forced``: token ids before each
        continuation, which count in its length."""
        self.rollouts = {rollout_key(rollout): rollout for rollout in rollouts}
        self.places, self.samples, self.first_track = places, samples, FIRST_TRACK + seed * TRACKS
        self.forced = forced

    @property
    def prompts(self) -> list[Prompt]:
        """The prompts of what it continues, in the order in which they were drawn."""
        prompts = {key[0]: self.rollouts[key].prompt for key in self.places}
        return sorted(prompts.values(), key=lambda prompt: prompt.number)

    def harvesters(self, prompts: Sequence[Prompt], setting: Setting) -> list[Harvester]:
        asked = {prompt.prompt_id for prompt in prompts}
        return [Probed(self.rollouts[key], self, setting) for key in self.places if key[0] in asked]
