"""A group's parts: its completions."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_eqlen.sampling.harvester import RolloutHeader, RolloutPart, in_order
from megatron_eqlen.types import Group


def parts(group: Group) -> list[RolloutPart]:
    return [
        RolloutPart("completion", number, completion)
        for number, completion in zip(group.numbers, group.completions, strict=True)
    ]


def join(head: RolloutHeader, parts: Sequence[RolloutPart]) -> Group:
    """The inverse of ``parts``, which may come in any order."""
    parts = in_order(parts)
    return Group(
        prompt=head.prompt,
        policy_version=head.policy_version,
        completions=[one.segment for one in parts],
        index=head.index,
        prompt_routes=head.prompt_routes,
        numbers=[one.number for one in parts],
        suspended=head.outcome == "suspended",
    )
