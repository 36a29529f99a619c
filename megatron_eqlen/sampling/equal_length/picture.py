"""A stream as people see it: pair after pair, then what the trunk generated alone."""

from __future__ import annotations

from megatron_eqlen.sampling.picture import Picture, Placed, count
from megatron_eqlen.types import Stream


def picture(stream: Stream) -> Picture:
    pairs = []
    for number, pair in enumerate(stream.pairs):
        prefix = stream.trunk_token_ids(number)
        sides = (Placed(f"A{number + 1}", pair.a, prefix), Placed(f"B{number + 1}", pair.b, prefix))
        pairs.append(sides)
    rest = []
    if stream.tail is not None:
        rest = [Placed("tail", stream.tail, stream.trunk_token_ids(len(pairs)))]
    outcome = stream.outcome.replace("_", " ")
    return Picture(f"stream {stream.index}, {count(len(pairs), 'pair')}, {outcome}", pairs, rest)
