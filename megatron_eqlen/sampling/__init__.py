"""How rollouts are made and compared: one folder for each value of the recipe's ``sampling``."""

from __future__ import annotations

from megatron_eqlen.sampling import equal_length, independent, tree
from megatron_eqlen.sampling.kind import SamplingKind
from megatron_eqlen.types import Rollout

KINDS: dict[str, SamplingKind] = {
    kind.name: kind for kind in (equal_length.KIND, independent.KIND, tree.KIND)
}


def kind_of(rollout: Rollout) -> SamplingKind:
    """The kind that made a rollout."""
    return next(kind for kind in KINDS.values() if isinstance(rollout, kind.rollout))
