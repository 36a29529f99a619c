"""Harvesters, which make a rollout each out of the tokens of its tracks.

tracks ─tokens─► Harvester ─► parts (final, append-only) ─► rollout
                    └──events──► HarvestObserver (recorder, graders)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from megatron_eqlen.recipe import Recipe
from megatron_eqlen.sampling.track import Track
from megatron_eqlen.tokens import TokenIds, Tokens
from megatron_eqlen.types import Outcome, Part, Prompt, Rollout, last_turn, line_of

if TYPE_CHECKING:
    from megatron_eqlen.hf.tokenizer import Tokenizer


class Marker(NamedTuple):
    """Text that sampling looks for in a response."""

    contains: Callable[[list[int]], bool]
    """Returns True if the text of these consecutive tokens contains it."""
    width: int
    """Most tokens that it takes."""

    @classmethod
    def of(cls, text: str, tokenizer: Tokenizer, key: str = "tree_sampling.marker") -> Marker:
        """Return the marker ``text`` of ``key``. Raises ValueError if no response can contain it."""
        if text not in (read := tokenizer.decode(tokenizer.encode(text))):
            found = f"found that the tokenizer reads its tokens as {read!r} (without end-of-sequence tokens)"
            raise ValueError(f"{key}: {text!r}: expected text that a response can contain, {found}")

        def contains(token_ids: list[int]) -> bool:
            return text in tokenizer.decode(token_ids)

        # a token holds at least one byte
        return cls(contains, len(text.encode()))


class Setting(NamedTuple):
    """Values that the harvesters of a step's rollouts share."""

    recipe: Recipe
    eos_token_ids: frozenset[int]
    seed: int
    marker: Marker | None = None
    """Marker that trees fork after (``tree_sampling.marker``)."""
    takes_turns: bool = False
    """True if an environment answers the ends of turns."""


class Harvester(ABC):
    """Makes one rollout: launches tracks and decides, from their tokens, when the rollout is complete. It
    sees token sequences only, and the result does not depend on the order in which they arrive."""

    def __init__(self, prompt: Prompt, index: int, setting: Setting) -> None:
        """``index``: the rollout's number among those of its prompt."""
        self.prompt, self.index, self.kind = prompt, index, setting.recipe.sampling
        self.key = prompt.prompt_id, index
        self.eos_token_ids, self.seed = setting.eos_token_ids, setting.seed
        self.takes_turns = setting.takes_turns
        self.limit: int = setting.recipe.rollout.max_response_length
        """Most tokens of a response."""
        self.parts: list[Part] = []
        """Finished parts, append-only."""
        self.open: dict[int, Track] = {}
        """Tracks that may grow or wait for others, by number; the trunk's track of a stream comes first."""
        self.forks: dict[int, tuple[int, ...]] = {}
        """``Track.forks`` of the tracks that made finished parts, by the parts' numbers."""
        self.outcome: Outcome = "suspended"
        self.prompt_columns: Tokens | None = None
        """Columns of the prompt's tokens, once the driver has them (``Rollout.prompt_columns``)."""

    @property
    def complete(self) -> bool:
        return self.outcome != "suspended"

    @abstractmethod
    def start(self) -> list[Track]:
        """Return the first tracks to launch."""

    @abstractmethod
    def advance(self) -> list[Track]:
        """Return the tracks to launch, after a track has ended or has reached ``Track.awaited``."""

    def answerable(self) -> list[Track]:
        """Return the tracks whose ended turns the environment may answer now. A fork copies the environment
        of the line that it leaves, as it is there, so an answer waits until no fork can lie before it."""
        return [track for track in self.open.values() if track.awaits_answer]

    @abstractmethod
    def cut(self) -> None:
        """Complete the rollout with the tokens that are there, because the budget is used up."""

    def rollout(self, policy_version: int) -> Rollout:
        """Return the rollout of the parts, suspended unless it is complete."""
        return Rollout(
            self.prompt, self.index, self.kind, policy_version, self.parts, self.outcome, self.prompt_columns
        )

    def response(self, part: Part) -> TokenIds:
        """Return the token ids of a response, or of its last turn. Any thread may call this."""
        return last_turn(self.line(part.number))

    def open_track(self, number: int, response: list[int], limit: int, parent: int) -> Track:
        """Return a new track of up to ``limit`` tokens after ``response``, the path to part ``parent``."""
        track = self.open[number] = Track(
            self.prompt, self.index, number, response, limit, self.eos_token_ids, self.seed, parent
        )
        track.takes_turns = self.takes_turns
        track.forks = (*self.forks[parent], number) if parent in self.forks else ()
        return track

    def add_part(self, track: Track, role: str, number: int, length: int | None = None) -> Part:
        """Make the next ``length`` generated tokens of a track (default: all that are in no part) part
        ``number``, with an environment's answers to them."""
        stop = len(track) if length is None else track.start + length
        # a part that is cut before the track's end has neither its reason nor its grade
        reason = track.finish_reason if stop == len(track) else None
        tokens = track.tokens[track.place(track.start) : track.place(stop)]
        grade = track.grade if reason == "stop" else None
        part = Part(tokens, reason, grade, role, number, track.parent)
        track.start, track.parent = stop, number
        self.forks[number] = track.forks
        self.parts.append(part)
        return part

    def line(self, number: int) -> list[Part]:
        """Return the finished parts from the prompt down to part ``number``; none for -1."""
        return line_of({part.number: part for part in self.parts}, number)


def every_rollout(prompt: Prompt, index: int) -> bool:
    """Select every rollout, by its prompt and its number."""
    return True


class HarvestObserver:
    """Receives the events of a harvest; does nothing by default. The driver calls the methods in its own
    thread, between two decode steps, so they must return at once."""

    def harvest_started(self, first: str, counts: Mapping[str, int]) -> None:
        """Handle the start of an attempt that counts in ``counts``. ``first``: its first prompt's id."""

    def track_launched(self, track: Track) -> None:
        """Handle a new track, still without the tokens of earlier attempts and steps."""

    def part_finished(self, harvester: Harvester, part: Part) -> None:
        """Handle a part that has become final in this step."""

    def rollout_completed(self, rollout: Rollout, generated_tokens: int) -> None:
        """Handle a complete rollout, for whose tracks this step generated so many tokens."""

    def rollout_suspended(self, rollout: Rollout, generated_tokens: int, tracks: Sequence[Track]) -> None:
        """Handle a rollout that the next step resumes from the tokens of ``tracks``, as a harvest ends."""

    def decode_step_finished(self, last: bool = False) -> None:
        """Handle the end of a decode step; ``last`` is True at the end of the harvest."""
