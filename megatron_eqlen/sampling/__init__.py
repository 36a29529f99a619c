"""Sampling kinds: how rollouts are made and compared, a class for each value of the recipe's ``sampling``."""

from __future__ import annotations

from typing import Any

from megatron_eqlen.sampling import independent, tree
from megatron_eqlen.sampling.equal_length import streams
from megatron_eqlen.sampling.kind import SamplingKind
from megatron_eqlen.types import Rollout

KINDS: dict[str, SamplingKind[Any]] = {
    kind.name: kind for kind in (streams.KIND, independent.KIND, tree.KIND)
}


def kind_of(rollout: Rollout) -> SamplingKind[Any]:
    """Return the kind that made a rollout."""
    return next(kind for kind in KINDS.values() if isinstance(rollout, kind.rollout_type))
