"""A stream's parts: the two sides of each pair in turn, then the tail."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_eqlen.sampling.harvester import RolloutHeader, RolloutPart
from megatron_eqlen.types import Pair, Stream


def parts(stream: Stream) -> list[RolloutPart]:
    named = [named for pair in stream.pairs for named in (("a", pair.a), ("b", pair.b))]
    named += [("tail", stream.tail)] if stream.tail is not None else []
    return [RolloutPart(role, number, segment) for number, (role, segment) in enumerate(named)]


def join(head: RolloutHeader, parts: Sequence[RolloutPart]) -> Stream:
    """The inverse of ``parts``."""
    assert head.outcome is not None, "a stream's record has an outcome"
    segments: dict[str, list] = {"a": [], "b": [], "tail": []}
    for part in parts:
        segments[part.role].append(part.segment)
    return Stream(
        prompt=head.prompt,
        index=head.index,
        policy_version=head.policy_version,
        pairs=[Pair(a, b) for a, b in zip(segments["a"], segments["b"], strict=True)],
        outcome=head.outcome,
        tail=segments["tail"][0] if segments["tail"] else None,
        prompt_routes=head.prompt_routes,
    )
