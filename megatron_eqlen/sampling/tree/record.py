"""A sampled tree's parts: its steps, each with the step that it continues."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_eqlen.sampling.record import Head, Part
from megatron_eqlen.types import SampledTree


def parts(tree: SampledTree) -> list[Part]:
    return [Part("step", step, parent) for step, parent in zip(tree.steps, tree.parents, strict=True)]


def join(head: Head, parts: Sequence[Part]) -> SampledTree:
    """The inverse of ``parts``."""
    steps, parents = [part.segment for part in parts], [part.parent for part in parts]
    return SampledTree(head.prompt, head.policy_version, steps, parents, head.index)
