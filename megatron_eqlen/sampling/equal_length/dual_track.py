"""Dual-track generation of equal-length pairs, defined on positions (the paper's section 3.2).

    position     0        L_1              L_1 + L_2
    track 1      A_1 ■                                      ■ = end of sequence
    track 2      B_1 │ A_2 ■                                its tokens after L_1 are a head start
    track 3            B_2 │ ...                            forked at L_1, on prompt + B_1

The paper decodes two tracks in lockstep. All that must hold is about positions: when the shorter ended
length L is certain, the ended track's L tokens are A_i, the other's first L tokens are B_i, and B_i joins
the trunk. The other track is never interrupted; one new track is forked on prompt + trunk, because an
independent continuation of a prefix is what the paper's two fresh tracks are. So no token is generated
twice, and the harvest depends on token sequences alone.

With an environment, lengths count generated tokens. A side that ends a turn where it is cut includes the
environment's answer; the fork starts after it, with a copy of the environment.
"""

from __future__ import annotations

from typing import NamedTuple

from megatron_eqlen.sampling.harvester import Harvester, in_step
from megatron_eqlen.sampling.track import Track
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
    """Return the tokens of the trunk's track after the last pair (the invalid suffix, never trained by the
    paper's methods). If the track ended, their grade still counts as an extension of every B."""
    return next(iter(stream.with_role("tail")), None)


class DualTrack(Harvester):
    """Harvests one stream: launches its tracks and cuts pairs out of their tokens."""

    kind = "equal_length"

    def __init__(
        self,
        prompt: Prompt,
        index: int,
        limit: int,
        eos_token_ids: frozenset[int],
        seed: int,
        max_pairs: int | None = None,
    ) -> None:
        super().__init__(prompt, index, limit, eos_token_ids, seed)
        self.max_pairs = max_pairs
        self.trunk: list[int] = []
        self.trunk_length = 0
        """Generated tokens of the trunk."""
        self.launched = 0

    def start(self) -> list[Track]:
        return [self._launch(-1), self._launch(-1)]

    def advance(self) -> list[Track]:
        """Cut the next pair if its length is certain; return the fork to launch, if any."""
        tracks = list(self.open.values())
        if len(tracks) == 1:  # max_pairs are there
            if tracks[0].finish_reason is not None:
                self._complete("max_pairs")
            return []
        ended = [track for track in tracks if track.finish_reason == "stop"]
        if not ended:
            if all(track.finish_reason == "length" for track in tracks):
                self._complete("truncated")
            return []
        short = min(ended, key=_outside)
        other = tracks[1] if short is tracks[0] else tracks[0]
        if _outside(other) < _outside(short):
            assert other.finish_reason != "length", "a truncated track is as long as any"
            other.awaited = other.start + _outside(short)
            return []
        if other.calls and _outside(other) == _outside(short):
            return []  # the environment may end it here
        return self._inherit(short, other)

    def calls(self) -> list[Track]:
        tracks = list(self.open.values())
        return in_step(tracks, [_outside(track) for track in tracks])

    def cut(self) -> None:
        self._complete("budget")

    def _inherit(self, short: Track, other: Track) -> list[Track]:
        """Cut the next pair, ``short`` as A_i and as many tokens of ``other`` as B_i; return the fork."""
        length, number = _outside(short), len(self.parts)
        self.add_part(short, "a", number)
        b = self.add_part(other, "b", number + 1, length)
        assert len(b) == length > 0
        self.open = {other.number: other}
        if b.finish_reason == "stop":
            self._complete("both_ended")
            return []
        self.trunk += b.token_ids.tolist()
        self.trunk_length += length
        if self.trunk_length == self.limit:
            self._complete("truncated")
        elif len(self.parts) // 2 == self.max_pairs:
            self.advance()  # the survivor may have finished already
        else:
            return [self._launch(b.number)]
        return []

    def _complete(self, outcome: Outcome) -> None:
        """End the stream; tokens of the trunk's track that are in no pair become the tail."""
        self.outcome = outcome
        trunk = next(iter(self.open.values()))
        if _outside(trunk):
            self.add_part(trunk, "tail", len(self.parts))

    def _launch(self, parent: int) -> Track:
        self.launched += 1
        return self.open_track(self.launched - 1, self.trunk, self.limit - self.trunk_length, parent)


def _outside(track: Track) -> int:
    """Return the number of a track's generated tokens that are in no part."""
    return len(track) - track.start
