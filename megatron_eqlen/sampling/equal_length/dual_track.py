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
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megatron_eqlen.sampling.harvester import RolloutHeader, RolloutPart
from megatron_eqlen.sampling.track import Track
from megatron_eqlen.tokens import TokenIds, Tokens, join
from megatron_eqlen.types import Outcome, Pair, Prompt, Segment, Stream


def stream_of(header: RolloutHeader, parts: Sequence[RolloutPart]) -> Stream:
    """Return the stream made of ``parts``: a and b of each pair, in order, and the tail."""
    assert header.outcome is not None, "a stream's record has an outcome"
    segments: dict[str, list[Segment]] = {"a": [], "b": [], "tail": []}
    for part in parts:
        segments[part.role].append(part.segment)
    return Stream(
        prompt=header.prompt,
        index=header.index,
        policy_version=header.policy_version,
        pairs=[Pair(a, b) for a, b in zip(segments["a"], segments["b"], strict=True)],
        outcome=header.outcome,
        tail=segments["tail"][0] if segments["tail"] else None,
        prompt_columns=header.prompt_columns,
    )


class OpenTrack:
    """A track, and the number of its tokens that are part of the trunk."""

    def __init__(self, track: Track) -> None:
        self.track = track
        self.start = 0

    def __len__(self) -> int:
        return len(self.track) - self.start

    @property
    def ended(self) -> bool:
        return self.track.finish_reason == "stop"

    @property
    def truncated(self) -> bool:
        return self.track.finish_reason == "length"

    def segment(self, length: int | None = None) -> Segment:
        """Return the next ``length`` tokens (default: all) after those in the trunk."""
        return self.track.segment(self.start, None if length is None else self.start + length)


class DualTrack:
    """Harvests one stream: launches its tracks and cuts pairs out of their tokens."""

    def __init__(
        self,
        prompt: Prompt,
        index: int,
        limit: int,
        eos_token_ids: frozenset[int],
        seed: int,
        max_pairs: int | None = None,
    ) -> None:
        self.prompt = prompt
        self.index = index
        self.limit = limit
        self.eos_token_ids = eos_token_ids
        self.seed = seed
        self.max_pairs = max_pairs
        self.trunk: list[int] = []
        self.parts: list[RolloutPart] = []
        """Sides a and b of each pair, then the tail."""
        self.prompt_columns: Tokens | None = None
        self.open: list[OpenTrack] = []
        """The trunk's track first; alone once ``max_pairs`` are there."""
        self.outcome: Outcome | None = None
        self.launched = 0

    @property
    def complete(self) -> bool:
        return self.outcome is not None

    def start(self) -> list[Track]:
        return [self._launch(), self._launch()]

    def advance(self) -> list[Track]:
        """Cut the next pair if its length is certain; return the fork to launch, if any."""
        if len(self.open) == 1:
            if self.open[0].track.finish_reason is not None:
                self._complete("max_pairs")
            return []
        ended = [track for track in self.open if track.ended]
        if not ended:
            if all(track.truncated for track in self.open):
                self._complete("truncated")
            return []
        short = min(ended, key=len)
        other = self.open[1] if short is self.open[0] else self.open[0]
        if len(other) < len(short):
            assert not other.truncated, "a truncated track is as long as any"
            other.track.awaited = other.start + len(short)
            return []
        return self._inherit(short, other)

    def cut(self) -> None:
        self._complete("budget")

    def response(self, part: RolloutPart) -> TokenIds:
        trunk = [before.segment.token_ids for before in self.parts[: part.number] if before.role == "b"]
        return join([*trunk, part.segment.token_ids])

    def parts_along(self, track: Track) -> Iterator[tuple[int, RolloutPart, int]]:
        start = 0  # both tracks continue the trunk, which all B sides make
        for part in self.parts:
            on_path = part.role == "b"
            yield start, part, len(part.segment) if on_path else 1
            start += len(part.segment) if on_path else 0

    def rollout(self, policy_version: int) -> Stream:
        outcome = self.outcome or "suspended"
        header = RolloutHeader(self.prompt, self.index, policy_version, outcome, self.prompt_columns)
        return stream_of(header, self.parts)

    def _inherit(self, short: OpenTrack, other: OpenTrack) -> list[Track]:
        """Cut the next pair, ``short`` as A_i and as many tokens of ``other`` as B_i; return the fork."""
        length = len(short)
        a, b = short.segment(), other.segment(length)
        assert len(a) == len(b) > 0
        self._add("a", a)
        self._add("b", b)
        other.start += length
        self.open = [other]
        if b.finish_reason == "stop":
            self._complete("both_ended")
            return []
        self.trunk += b.token_ids.tolist()
        if len(self.trunk) == self.limit:
            self._complete("truncated")
        elif len(self.parts) // 2 == self.max_pairs:
            self.advance()  # the survivor may have finished already
        else:
            return [self._launch()]
        return []

    def _add(self, role: str, segment: Segment) -> None:
        self.parts.append(RolloutPart(role, len(self.parts), segment))

    def _complete(self, outcome: Outcome) -> None:
        """End the stream; tokens of the trunk's track that are in no pair become the tail."""
        self.outcome = outcome
        if len(self.open[0]):
            self._add("tail", self.open[0].segment())

    def _launch(self) -> Track:
        track = Track(
            self.prompt,
            self.index,
            self.launched,
            self.trunk,
            self.limit - len(self.trunk),
            self.eos_token_ids,
            self.seed,
        )
        self.launched += 1
        self.open.append(OpenTrack(track))
        return track
