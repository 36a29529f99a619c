"""What people see of a rollout: its segments, what each inherits, and which of them stand side by side."""

from __future__ import annotations

from dataclasses import dataclass, field

from megatron_eqlen.types import Segment, TokenIds


@dataclass(frozen=True)
class Placed:
    """A segment where it lies in its rollout."""

    label: str
    """``A1``, ``B1``, ``tail``, ``completion 3``, ``step 2 after step 0``."""
    segment: Segment
    inherited: TokenIds
    """Between the prompt and the segment."""


@dataclass(frozen=True)
class Picture:
    title: str
    pairs: list[tuple[Placed, Placed]] = field(default_factory=list)
    """(A, B): A is a leaf that forks off where B, a part of the trunk, begins."""
    segments: list[Placed] = field(default_factory=list)
    """What is not part of a pair."""


def count(number: int, thing: str) -> str:
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"
