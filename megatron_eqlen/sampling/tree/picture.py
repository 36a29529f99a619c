"""A sampled tree as people see it: its steps, each with the one that it continues."""

from __future__ import annotations

from megatron_eqlen.sampling.picture import Picture, Placed, count
from megatron_eqlen.types import SampledTree


def picture(tree: SampledTree) -> Picture:
    segments = []
    for number, (step, parent) in enumerate(zip(tree.steps, tree.parents, strict=True)):
        label = f"step {number}" + (f" after step {parent}" if parent >= 0 else "")
        segments.append(Placed(label, step, tree.response(parent)))
    return Picture(f"tree of {count(len(segments), 'step')}", segments=segments)
