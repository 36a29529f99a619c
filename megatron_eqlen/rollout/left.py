"""What a harvest goes on from: what earlier attempts at its step have ``Left``, and what earlier steps
suspended (``Carried``). ``record_reader`` and ``carried`` read it from disk."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from megatron_eqlen.sampling import kind_of
from megatron_eqlen.sampling.record import Part
from megatron_eqlen.types import Rollout, RolloutKey, Routes, Segment


@dataclass
class Left:
    """What earlier attempts at a step have recorded of some prompts (``record_reader.read_left``)."""

    rollouts: list[Rollout] = field(default_factory=list)
    """Complete, in training order: they are not generated again."""
    tracks: dict[str, Segment] = field(default_factory=dict)
    """Tokens of unfinished ones, by ``Track.name``, after which the engine goes on."""
    generated_tokens: int = 0
    """Of all these: they count towards ``rollout.tokens_per_step``."""
    prompt_routes: dict[RolloutKey, Routes] = field(default_factory=dict)
    """Of unfinished ones."""


@dataclass
class Carried:
    """A suspended rollout, as the next step takes it up."""

    rollout: Rollout
    """What was final of it, graded."""
    tracks: dict[str, Segment]
    """Tokens of its tracks, by ``Track.name``; none if it had not begun."""
    prompt_routes: Routes | None
    """With ``rollout.keep_routes``, if it had begun."""
    seed: int
    """Of the harvest that began it."""
    oldest_version: int
    """Of the weights that may have sampled its tokens."""
    age: int
    """Steps since the one that drew its prompt."""
    ends: bool = False
    """It is not suspended again: where the budget ends, it is cut."""

    def __post_init__(self) -> None:
        self.final = {part.number: part.segment for part in kind_of(self.rollout).parts(self.rollout)}

    @property
    def tokens(self) -> int:
        """Generated for it in earlier steps."""
        return sum(map(len, self.tracks.values()))

    def recall(self, parts: Iterable[Part]) -> list[Part]:
        """Give those of its ``parts`` that were final their grades; returns the others."""
        new: list[Part] = []
        for part in parts:
            before = self.final.get(part.number)
            if before is None:
                new.append(part)
            else:
                assert len(part.segment) == len(before), "a harvest is a function of its tracks' tokens"
                part.segment.grade, part.segment.carried = before.grade, True
        return new
