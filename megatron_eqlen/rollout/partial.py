"""Partial rollouts: recorded by a harvest that was killed, or suspended by an earlier step.

    step n                                                    step n + 1
    budget used up ─► finished parts: record (suspended) ───► PartialRollout ─► tracks start with their
                  └─► tokens of all its tracks: a file ───────┘                 tokens, the same parts are cut

The result of a harvest depends on the tokens of its tracks alone, so these are all that is needed to resume
it, after a kill (``HarvestProgress``) as well as in the next step (``PartialRollout``). Finished parts keep
their grades and are marked ``Segment.carried``: they are neither graded nor trained again. ``record_reader``
and ``read_partial`` read both from disk.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from megatron_eqlen.recipe import Recipe
from megatron_eqlen.sampling import kind_of
from megatron_eqlen.sampling.harvester import RolloutPart
from megatron_eqlen.types import Rollout, RolloutKey, Routes, Segment, rollout_key


@dataclass
class HarvestProgress:
    """Recorded results of earlier attempts at a step for some prompts (``record_reader.read_progress``)."""

    rollouts: list[Rollout] = field(default_factory=list)
    """Complete rollouts, in training order; they are not generated again."""
    tracks: dict[str, Segment] = field(default_factory=dict)
    """Tokens of the tracks of unfinished rollouts, by ``Track.name``."""
    generated_tokens: int = 0
    """Number of tokens of all these; they count towards ``rollout.tokens_per_step``."""
    prompt_routes: dict[RolloutKey, Routes] = field(default_factory=dict)
    """Routes of the prompts of unfinished rollouts."""


class RolloutOrigin(NamedTuple):
    """Step that drew the prompt of a rollout."""

    step: int
    oldest_version: int = 0
    """Oldest policy version that may have sampled a token; fixed at the start."""


@dataclass
class PartialRollout:
    """A suspended rollout, for the step that resumes it."""

    rollout: Rollout
    """Finished parts, graded."""
    tracks: dict[str, Segment]
    """Tokens of its tracks, by ``Track.name``; empty if it had not begun."""
    prompt_routes: Routes | None
    """Routes of the prompt, if the rollout had begun and ``rollout.keep_routes`` is on."""
    seed: int
    """Seed of the harvest that began it."""
    oldest_version: int
    """Oldest policy version that may have sampled a token."""
    age: int
    """Steps since the one that drew its prompt."""
    last_step: bool = False
    """True where it is not suspended again: it is cut where the budget ends."""

    def __post_init__(self) -> None:
        self.final = {part.number: part.segment for part in kind_of(self.rollout).parts(self.rollout)}

    @property
    def key(self) -> RolloutKey:
        return rollout_key(self.rollout)

    @property
    def tokens(self) -> int:
        """Number of tokens that earlier steps generated for it."""
        return sum(map(len, self.tracks.values()))

    def restore_grades(self, parts: Iterable[RolloutPart]) -> list[RolloutPart]:
        """Copy recorded grades to those of ``parts`` that were final before; return the other parts."""
        new: list[RolloutPart] = []
        for part in parts:
            before = self.final.get(part.number)
            if before is None:
                new.append(part)
            else:
                assert len(part.segment) == len(before), "a harvest is a function of its tracks' tokens"
                part.segment.grade, part.segment.carried = before.grade, True
        return new


def restore_grades(partial: Iterable[PartialRollout], rollouts: Iterable[Rollout]) -> None:
    """Call ``PartialRollout.restore_grades`` for those of ``rollouts`` that were resumed."""
    by_key = {resumed.key: resumed for resumed in partial}
    for rollout in rollouts:
        if rollout_key(rollout) in by_key:
            by_key[rollout_key(rollout)].restore_grades(kind_of(rollout).parts(rollout))


def open_prompts(suspended: Iterable[Rollout], recipe: Recipe) -> float:
    """Return the number of new prompts that would start as many tracks as are open in ``suspended``."""
    shares = (kind_of(rollout).open_share(rollout, recipe) for rollout in suspended)
    return sum(shares) / recipe.rollouts_per_prompt
