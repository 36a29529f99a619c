"""Harvesters, which make a rollout each out of the tokens of its tracks, and the parts that they make.

tracks ─tokens─► Harvester ─► parts (final, append-only) ─► rollout
                     │
                     └──events──► HarvestObserver (recorder, graders)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from megatron_eqlen.sampling.track import Track
from megatron_eqlen.tokens import TokenIds, Tokens
from megatron_eqlen.types import Outcome, Prompt, Rollout, Segment, Suspended


@dataclass(frozen=True)
class RolloutPart:
    """A segment and its place in its rollout, which is harvested, recorded and read as a list of parts."""

    role: str
    """``a``, ``b``, ``tail``, ``completion`` or ``step``."""
    number: int
    """Identifies the part in its rollout. It does not depend on the order in which parts become final."""
    segment: Segment
    parent: int = -1
    """Number of the step that a ``step`` continues, -1 for the prompt."""


def in_order(parts: Sequence[RolloutPart]) -> list[RolloutPart]:
    """Return the parts sorted by number."""
    return sorted(parts, key=lambda part: part.number)


@dataclass(frozen=True)
class RolloutHeader:
    """Everything that a rollout holds besides its parts."""

    prompt: Prompt
    index: int
    policy_version: int
    outcome: Outcome | Suspended | None = None
    """Outcome of a stream. Rollouts of other kinds have ``suspended`` or None."""
    prompt_columns: Tokens | None = None


def header_of(rollout: Rollout) -> RolloutHeader:
    """Return the header of a rollout."""
    outcome = "suspended" if rollout.suspended else getattr(rollout, "outcome", None)
    return RolloutHeader(
        rollout.prompt, rollout.index, rollout.policy_version, outcome, rollout.prompt_columns
    )


class Harvester(Protocol):
    """Makes one rollout: launches tracks and decides, from their tokens, when the rollout is complete.

    Plain Python that sees token sequences only. The result does not depend on the order in which tokens
    arrive.
    """

    prompt: Prompt
    index: int
    """Number of the rollout among those of its prompt."""
    parts: list[RolloutPart]
    """Finished parts, append-only."""
    prompt_columns: Tokens | None
    """Columns of the prompt's tokens, once the driver has them (``types.Stream.prompt_columns``)."""

    @property
    def complete(self) -> bool: ...

    def start(self) -> list[Track]:
        """Return the first tracks to launch."""
        ...

    def advance(self) -> list[Track]:
        """Use the new tokens of the tracks and return the tracks to launch. Called when a track has ended or
        has reached the length ``Track.awaited``."""
        ...

    def cut(self) -> None:
        """Complete the rollout with the tokens that are there, because the budget is used up."""
        ...

    def response(self, part: RolloutPart) -> TokenIds:
        """Return the token ids from after the prompt to the end of ``part``. Any thread may call this."""
        ...

    def parts_along(self, track: Track) -> Iterator[tuple[int, RolloutPart, int]]:
        """Yield the finished parts that share positions with the path of ``track``: the part's first position
        after the prompt, the part, and how many of its tokens were predicted at positions on the path. These
        are all of a part that lies on the path, and the first one of a part that forks off it (a token is
        predicted at the position before it)."""
        ...

    def rollout(self, policy_version: int) -> Rollout:
        """Join the parts to a rollout, which is suspended unless it is complete. Called after ``start``."""
        ...


def all_rollouts(prompt: Prompt, index: int) -> bool:
    """Select every rollout, by its prompt and its number."""
    return True


class HarvestObserver:
    """Receives the events of a harvest. Every method does nothing by default.

    The driver calls the methods in its own thread, between two decode steps, so they must return at once.
    """

    def track_launched(self, track: Track) -> None:
        """Handle a new track, which holds the tokens of earlier attempts and steps, if any."""

    def part_finished(self, harvester: Harvester, part: RolloutPart) -> None:
        """Handle a part that has become final in this step."""

    def rollout_completed(self, rollout: Rollout, generated_tokens: int) -> None:
        """Handle a complete rollout. ``generated_tokens``: tokens of all its tracks in this step, whether or
        not they are in parts."""

    def rollout_suspended(self, rollout: Rollout, generated_tokens: int, tracks: Sequence[Track]) -> None:
        """Handle a rollout that the next step resumes from the tokens of ``tracks``. Called at the end of a
        harvest, before the last ``decode_step_finished``."""

    def decode_step_finished(self, last: bool = False) -> None:
        """Handle the end of a decode step; ``last`` is True at the end of the harvest."""
