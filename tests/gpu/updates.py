"""Two optimizer steps of a tiny model of each family, in a process of its own.

    python -m tests.gpu.updates FOLDER DTYPE RESULT

``FOLDER`` has a model's folder for each family; ``RESULT`` gets family -> (norms of the gradients, weights
before, weights after), or the traceback.
"""

from __future__ import annotations

import sys
import traceback
from pathlib import Path

import torch
from torch import Tensor

from megatron_eqlen.job import Job
from megatron_eqlen.models import groups
from megatron_eqlen.training.policy import Policy
from tests.kit.updates import one_tree_a_row, recipe_of, weights_of

Result = tuple[list[float], dict[str, Tensor], dict[str, Tensor]]


def two_steps(folder: Path, dtype: str) -> Result:
    """Update, park, fetch back and update again."""
    recipe = recipe_of(str(folder), {"model": {"dtype": dtype}})
    groups.start(recipe.parallel, seed=1)
    try:
        policy = Policy(Job(recipe))
        before = on_host(weights_of(policy))
        norms = [policy.update([one_tree_a_row(3)]).metrics["train/grad_norm"]]
        policy.park()
        policy.unpark()
        norms.append(policy.update([one_tree_a_row(2)]).metrics["train/grad_norm"])
        return norms, before, on_host(weights_of(policy))
    finally:
        groups.stop()


def on_host(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: weight.float().cpu() for name, weight in weights.items()}


def main(folder: Path, dtype: str, result: Path) -> None:
    found: dict[str, Result | str] = {}
    for family in sorted(folder.iterdir()):
        try:
            found[family.name] = two_steps(family, dtype)
        except Exception:  # noqa: BLE001  the family's test shows it, and the others have their results
            found[family.name] = traceback.format_exc()
    torch.save(found, result)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
