"""A rollout as a flat list of parts: how it is harvested, goes to disk and comes back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_eqlen.types import Outcome, Prompt, Rollout, Routes, Segment, Suspended


@dataclass(frozen=True)
class Part:
    """A segment and what it is in its rollout."""

    role: str
    """``a``, ``b``, ``tail``, ``completion`` or ``step``."""
    number: int
    """Names it in its rollout, whichever part becomes final first: the same in every harvest."""
    segment: Segment
    parent: int = -1
    """Number of the step that a ``step`` continues."""


def in_order(parts: Sequence[Part]) -> list[Part]:
    return sorted(parts, key=lambda part: part.number)


@dataclass(frozen=True)
class Head:
    """What a rollout is besides its parts."""

    prompt: Prompt
    index: int
    policy_version: int
    outcome: Outcome | Suspended | None = None
    """A stream's; of other rollouts only whether they are suspended."""
    prompt_routes: Routes | None = None


def head_of(rollout: Rollout) -> Head:
    outcome = "suspended" if rollout.suspended else getattr(rollout, "outcome", None)
    return Head(rollout.prompt, rollout.index, rollout.policy_version, outcome, rollout.prompt_routes)
