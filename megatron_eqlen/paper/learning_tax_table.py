"""The learning tax of runs, from their recorded rollouts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron_eqlen.files import step_folders
from megatron_eqlen.objectives.build import build_minibatches
from megatron_eqlen.objectives.dynamic_sampling import trained
from megatron_eqlen.paper.learning_tax import Tax, learning_tax
from megatron_eqlen.paper.tables import METHOD
from megatron_eqlen.recipe import Recipe
from megatron_eqlen.report.run_groups import BASE, Group
from megatron_eqlen.report.tables import Column
from megatron_eqlen.rollout.record.reader import read_step

STEPS = 8
"""Number of a run's steps that are read, evenly spread."""


def tax_of_run(folder: Path, recipe: Recipe) -> Tax:
    """Return the tax of some steps of a run; zero if it kept no rollouts."""
    steps = [step for _, step in step_folders(folder / "streams")]
    chosen = (
        np.unique(np.linspace(0, len(steps) - 1, min(STEPS, len(steps))).round().astype(int)) if steps else []
    )
    return sum((tax_of_step(steps[number], recipe) for number in chosen), Tax())


def tax_of_step(folder: Path, recipe: Recipe) -> Tax:
    rollouts = trained(read_step(folder, with_routes=False), recipe)
    batches, _ = build_minibatches(rollouts, recipe)
    return sum(map(learning_tax, batches), Tax())


def learning_taxes(groups: Sequence[Group]) -> list[dict[Column, Any]]:
    """Return a row for each method: its runs' shared prefixes, and the sums of their gradients."""
    rows = []
    for group in groups:
        if group.method == BASE:
            continue
        tax = sum((tax_of_run(run.folder, run.recipe) for run in group.runs), Tax())
        rows.append(
            {
                METHOD: group.method,
                "shared tokens": tax.shared,
                "pushed both ways, %": 100 * tax.opposed_share,
                "cancelled, %": 100 * tax.cancelled_share,
                "gradient: mean": tax.mean,
                "gradient: deviation": tax.deviation,
            }
        )
    return rows
