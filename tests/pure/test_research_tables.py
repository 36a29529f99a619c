"""Tables of ``tools/research`` on the runs of a sweep: the numbers are those of the raw files."""

from __future__ import annotations

import math
from pathlib import Path
from statistics import fmean, stdev

import numpy as np
import pytest

from megatron_eqlen.evaluation.result import write_results
from megatron_eqlen.experiments.results import ended_groups
from megatron_eqlen.experiments.run_groups import BASE, Group
from tests.kit.sweeps import SWEEP, ended, result, rewards, write_sweep
from tools.research.sweep_tables import LENGTH, drifts, learned, pairs


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("sweep")


@pytest.fixture(scope="module")
def groups(home) -> dict[str, list[Group]]:
    """Return the groups of two recipes, the second of which is a control."""
    file = write_sweep(home, SWEEP.replace("[tiny.yaml]", "[tiny.yaml, coins.yaml]"))
    (home / "coins.yaml").write_text("extends: tiny.yaml\nname: coins\n")
    plan = ended(file)
    for cell in plan.cells:
        if cell.model == "coins":
            drifted = result(0.4 if cell.method == "eqlen" else 0.3, cell.seed)
            write_results(cell.folder / "evaluation/after.json", [drifted])
    found = [group for group in ended_groups(plan) if group.method != BASE]
    return {model: [group for group in found if group.model == model] for model in ("tiny", "coins")}


def row_of(rows, method: str) -> dict:
    return next(row for row in rows if row["Method"] == method)


def test_drift_is_the_mean_change_from_before_to_after_with_students_interval(groups, home):
    """Student's 0.975 quantile for 2 degrees of freedom is from a table."""
    row = row_of(drifts(groups["tiny"]), "eqlen")
    change = row[LENGTH].interval
    half = 4.302653 * stdev([4, 3, 2]) / math.sqrt(3)
    assert (change.mean, change.low, change.high) == pytest.approx((3, 3 - half, 3 + half))
    folders = [home / f"runs/tiny/eqlen-seed{seed}" for seed in range(3)]
    gains = [100 * (np.mean(rewards(f, "after")) - np.mean(rewards(f, "before"))) for f in folders]
    assert row["Accuracy, points"].interval.mean == pytest.approx(fmean(gains))
    assert (row["Seeds"], row["Entropy, nats"]) == (3, None), "these runs have not measured entropy"


def test_pairs_are_averaged_over_the_first_and_the_last_third_of_every_run(groups):
    """EqLen's runs have 4 steps: a third of them is one step."""
    first, last = (row for row in pairs(groups["tiny"]) if row["Method"] == "eqlen")
    assert (first["pairs a stream"], last["pairs a stream"]) == (4, 1)
    assert first["pairs with equal rewards, %"] == pytest.approx(100 * (0.1 + 0.01))
    assert last["pairs with equal rewards, %"] == pytest.approx(100 * (0.4 + 0.01))
    assert first["reward of B: max less mean"] is None, "these runs have not measured it"


def test_what_a_method_learned_is_its_gain_over_itself_on_the_control(groups, home):
    rows = learned(groups["tiny"], groups["coins"])
    for method in ("grpo", "eqlen"):
        gains = [
            np.mean(rewards(home / f"runs/tiny/{method}-seed{seed}", "after"))
            - np.mean(rewards(home / f"runs/coins/{method}-seed{seed}", "after"))
            for seed in range(3)
        ]
        assert row_of(rows, method)["sums"].interval.mean == pytest.approx(fmean(gains))
