"""Dual-track generation of equal-length pairs, defined on positions (the paper's section 3.2).

    position     0        L_1              L_1 + L_2
    track 1      A_1 ■                                      ■ = end of sequence
    track 2      B_1 │ A_2 ■                                its tokens after L_1 are a head start
    track 3            B_2 │ ...                            forked at L_1, on prompt + B_1

The paper decodes two tracks in lockstep. All that must hold is about positions: when the shorter ended length
L is certain, the ended track's L tokens are A_i, the other's first L tokens are B_i, and B_i joins the trunk.
The other track is never interrupted; one new track is forked on prompt + trunk, because an independent
continuation of a prefix is what the paper's two fresh tracks are. So no token is generated twice, and the
harvest depends on token sequences alone.

With an environment, lengths count generated tokens. A side that ends a turn where it is cut includes the
environment's answer; the fork starts after it, with a copy of the environment.
"""

from __future__ import annotations

from typing import NamedTuple

from megatron_eqlen.sampling.harvester import Setting
from megatron_eqlen.sampling.track import Track
from megatron_eqlen.sampling.tree import ForkedAtDeaths, OpenLine, Shape
from megatron_eqlen.types import Outcome, Part, Prompt, Rollout


class Pair(NamedTuple):
    """An equal-length pair: ``len(a) == len(b)``, both continuing the same prefix."""

    a: Part
    """The side that ended (``finish_reason == "stop"``)."""
    b: Part
    """The side that joined the trunk; ``stop`` too if both ended at this position."""


def pairs_of(stream: Rollout) -> list[Pair]:
    return [Pair(a, b) for a, b in zip(stream.with_role("a"), stream.with_role("b"), strict=True)]


def tail_of(stream: Rollout) -> Part | None:
    """Return the trunk's tokens after the last pair (the invalid suffix, never trained by the paper's
    methods). If its track ended, its grade still counts as an extension of every B."""
    return next(iter(stream.with_role("tail")), None)


class DualTrack(ForkedAtDeaths):
    """Harvests one stream: two lines that fork at deaths. Parts and tracks are numbered as they are made."""

    def __init__(self, prompt: Prompt, index: int, setting: Setting) -> None:
        recipe = setting.recipe
        most = recipe.equal_length.max_pairs or recipe.rollout.max_response_length
        super().__init__(prompt, index, setting, Shape(roots=2, branching=2, forks=most, role="b"))

    def cut(self) -> None:
        self._complete("budget")

    def die(self, line: OpenLine) -> list[Track]:
        """Cut the next pair, with the ended ``line`` as A_i; return the fork to launch, if any."""
        # after the last pair nothing was forked: the survivor has now ended alone
        if len(self.lines) == 1:
            return self._complete("max_pairs")
        # the shortest line reached the limit: no pair can end any more
        if line.track.finish_reason == "length":
            return self._complete("truncated")
        number, length = len(self.parts), line.length
        # A_i ends here, and B_i is cut from the other line at the same length
        self.add_part(line.track, "a", number)
        self.close(line)
        (other,) = self.lines
        other.number = number + 1
        # the other line forks again unless it ended, too, or this was the last pair
        goes_on, last = other.is_alive_at(length), self.forked == self.shape.forks - 1
        launched = self.fork(other, length, self.shape.branching if goes_on and not last else 1)
        if not goes_on:
            self._complete("both_ended" if self.parts[-1].finish_reason == "stop" else "truncated")
        return launched

    def _complete(self, outcome: Outcome) -> list[Track]:
        """End the stream; tokens of the trunk's track that are in no pair become the tail."""
        self.outcome = outcome
        # in the order of their launches: the older of two tracks holds the trunk
        trunk = next(iter(self.open.values()))
        if len(trunk) > trunk.start:
            self.add_part(trunk, "tail", len(self.parts))
        self.lines.clear()
        return []

    def _first_child(self, number: int) -> int:
        return 1 + self.forked
