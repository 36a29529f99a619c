"""What earlier attempts at a step have left, for the next one to go on with."""

from __future__ import annotations

from dataclasses import dataclass, field

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
