"""A sampled tree's parts: its steps, each with the step that it continues."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_eqlen.sampling.harvester import RolloutHeader, RolloutPart, in_order
from megatron_eqlen.types import SampledTree


def parts(tree: SampledTree) -> list[RolloutPart]:
    above = [-1 if parent < 0 else tree.numbers[parent] for parent in tree.parents]
    return [
        RolloutPart("step", number, step, parent)
        for number, step, parent in zip(tree.numbers, tree.steps, above, strict=True)
    ]


def join(head: RolloutHeader, parts: Sequence[RolloutPart]) -> SampledTree:
    """The inverse of ``parts``, which may come in any order."""
    parts = in_order(parts)
    place = {part.number: i for i, part in enumerate(parts)}
    return SampledTree(
        prompt=head.prompt,
        policy_version=head.policy_version,
        steps=[part.segment for part in parts],
        parents=[place.get(part.parent, -1) for part in parts],
        index=head.index,
        numbers=list(place),
        prompt_routes=head.prompt_routes,
        suspended=head.outcome == "suspended",
    )
