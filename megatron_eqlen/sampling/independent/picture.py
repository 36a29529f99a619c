"""A group as people see it: its completions."""

from __future__ import annotations

from megatron_eqlen.sampling.picture import Picture, Placed, count
from megatron_eqlen.types import NO_TOKENS, Group


def picture(group: Group) -> Picture:
    segments = [
        Placed(f"completion {number}", one, NO_TOKENS) for number, one in enumerate(group.completions)
    ]
    return Picture(count(len(segments), "completion"), segments=segments)
