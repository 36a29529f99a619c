"""Partial rollouts: rollouts with open tracks, whose tokens are on disk.

    step n     killed ───────────────► the same step again    ┐
    step n     budget used up ───────► step n + 1             ├─► tracks start with the tokens that they had,
                                                              ┘   the same parts are cut

A harvest's result depends on the tokens of its tracks alone, so these are all that it needs to resume. Parts
that were final when an earlier step ended keep their grades and are marked ``Part.carried``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from megatron_eqlen.recipe import Recipe
from megatron_eqlen.tokens import TEACHER, Tokens
from megatron_eqlen.types import Part, Prompt, Rollout, RolloutKey

SUSPENDED = "suspended"
"""Key in a data position that holds the rollouts that the next step resumes."""


class RolloutOrigin(NamedTuple):
    """Step that drew the prompt of a rollout."""

    step: int
    oldest_version: int = 0
    """Oldest policy version that may have sampled a token; fixed at the start."""


@dataclass(frozen=True)
class CarryOver:
    """Rollouts that steps hand to the next one (``rollout.carry_over``), the same on every rank."""

    resumed: Mapping[RolloutKey, RolloutOrigin] = field(default_factory=dict)
    """Rollouts that this step resumes."""
    suspended: Mapping[RolloutKey, RolloutOrigin] = field(default_factory=dict)
    """Rollouts that the next step resumes."""

    @classmethod
    def at(cls, data_position: Mapping[str, Any] | None) -> CarryOver:
        """Return what the steps before a position of the data source have suspended."""
        entries = (data_position or {}).get(SUSPENDED, [])
        return cls(suspended={(name, index): RolloutOrigin(*origin) for name, index, *origin in entries})

    def position(self) -> dict[str, Any]:
        """Return the part of a data position that ``at`` reads."""
        return {SUSPENDED: [[*key, *origin] for key, origin in self.suspended.items()]}

    def suspend(self, rollouts: Iterable[Rollout], origin: RolloutOrigin) -> CarryOver:
        """Add those of ``rollouts`` that are suspended. ``origin``: of rollouts that this step began; others
        keep the one that they had when they were suspended first."""
        keys = [rollout.key for rollout in rollouts if rollout.suspended]
        return CarryOver(self.resumed, {**self.suspended, **{k: self.resumed.get(k, origin) for k in keys}})


@dataclass
class PartialRollout:
    """A rollout that a harvest resumes."""

    prompt: Prompt
    index: int
    tracks: dict[int, Tokens] = field(default_factory=dict)
    """All tokens that its tracks had, by ``Track.number``; empty if it had not begun."""
    prompt_columns: Tokens | None = None
    """Columns of the prompt's tokens, if the rollout had begun and any are kept."""
    origin: RolloutOrigin | None = None
    """Origin of a rollout that an earlier step began. None: this step began it."""
    age: int = 0
    """Steps since the one that drew its prompt."""
    last_step: bool = False
    """True where it is not suspended again: it is cut where the budget ends."""
    final: dict[int, Part] = field(default_factory=dict)
    """Parts that were final when an earlier step ended, graded, by their number."""
    earlier: Mapping[int, int] = field(default_factory=dict)
    """Number of tokens that earlier steps generated of each track, by its number."""

    @property
    def key(self) -> RolloutKey:
        return self.prompt.prompt_id, self.index

    @property
    def earlier_tokens(self) -> int:
        return sum(self.earlier.values())

    @property
    def new_tokens(self) -> int:
        """Number of tokens that earlier attempts at this step generated for it."""
        return sum(tokens.generated for tokens in self.tracks.values()) - self.earlier_tokens

    def restore_grades(self, parts: Iterable[Part]) -> list[Part]:
        """Copy recorded grades to those of ``parts`` that were final before; return the other parts."""
        new: list[Part] = []
        for part in parts:
            before = self.final.get(part.number)
            if before is None:
                new.append(part)
            else:
                assert len(part) == len(before), "a harvest is a function of its tracks' tokens"
                part.grade, part.carried = before.grade, True
                if TEACHER.name in before.tokens:
                    part.tokens = part.tokens.with_column(TEACHER.name, before.tokens[TEACHER.name])
        return new


@dataclass
class HarvestProgress:
    """Recorded results of earlier attempts at a step, and of the step before, for some prompts."""

    rollouts: Sequence[Rollout] = ()
    """Rollouts that are complete, or suspended until the next step, in training order."""
    partial: Sequence[PartialRollout] = ()
    """Rollouts to resume."""
    generated_tokens: int = 0
    """Tokens that earlier attempts at this step generated, which count in ``rollout.tokens_per_step``."""
    counts: Counter[str] = field(default_factory=Counter)
    """Counts of the earlier attempts."""


def open_prompts(suspended: Iterable[Rollout], recipe: Recipe) -> float:
    """Return the number of new prompts that would start as many tracks as are open in ``suspended``.
    Completions that have ended leave their places free; streams and trees fork into them."""
    independent = recipe.sampling == "independent"
    # each part of a group is a completion that has ended
    shares = (1 - len(rollout.parts) / recipe.group_size if independent else 1.0 for rollout in suspended)
    return sum(shares) / recipe.rollouts_per_prompt
