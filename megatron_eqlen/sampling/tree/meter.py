"""The shape of sampled trees, as metrics: each step counts as a completion."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from megatron_eqlen.sampling.context import seen
from megatron_eqlen.sampling.independent.compare import reward
from megatron_eqlen.sampling.independent.meter import completions
from megatron_eqlen.sampling.kind import Draw
from megatron_eqlen.types import Metrics, SampledTree


def shape(trees: Sequence[SampledTree]) -> Metrics:
    branches = sum(parent >= 0 for tree in trees for parent in tree.parents)
    return completions(trees) | seen(trees, _starts, branches)


def draws(tree: SampledTree) -> Iterator[Draw]:
    """Steps that continue the same one are alike."""
    siblings = Counter(tree.parents)
    weights: list[float] = []
    ends: list[int] = []
    for step, parent in zip(tree.steps, tree.parents, strict=True):
        weights.append((weights[parent] if parent >= 0 else 1.0) / siblings[parent])
        ends.append((ends[parent] if parent >= 0 else 0) + len(step))
        if step.finish_reason is not None:
            yield Draw(weights[-1], ends[-1], reward(step, tree.prompt_id))


def _starts(tree: SampledTree) -> list[int]:
    ends: list[int] = []
    starts: list[int] = []
    for step, parent in zip(tree.steps, tree.parents, strict=True):
        starts.append(ends[parent] if parent >= 0 else 0)
        ends.append(starts[-1] + len(step))
    return starts
