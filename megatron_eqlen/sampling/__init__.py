"""Sampling kinds: how rollouts are made and compared, a class for each value of the recipe's ``sampling``."""

from __future__ import annotations

from megatron_eqlen.sampling import tree
from megatron_eqlen.sampling.equal_length import streams
from megatron_eqlen.sampling.kind import SamplingKind

KINDS: dict[str, SamplingKind] = {kind.name: kind for kind in (streams.KIND, tree.INDEPENDENT, tree.TREE)}
