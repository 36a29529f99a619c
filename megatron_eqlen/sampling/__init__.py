"""Sampling kinds: how rollouts are made and compared, a class for each value of the recipe's ``sampling``."""

from __future__ import annotations

from megatron_eqlen.recipe.plugins import load_object
from megatron_eqlen.sampling import tree
from megatron_eqlen.sampling.equal_length import streams
from megatron_eqlen.sampling.kind import SamplingKind


class Kinds(dict[str, SamplingKind]):
    """Sampling kinds by the recipe's ``sampling``; one of your own by its import path, which is its name."""

    def __missing__(self, path: str) -> SamplingKind:
        kind = load_object(path, "sampling", SamplingKind)
        if kind.name != path:
            raise ValueError(f"sampling: {path}: expected an object of this name, found {kind.name!r}")
        return kind


KINDS = Kinds({kind.name: kind for kind in (streams.KIND, tree.INDEPENDENT, tree.TREE)})
