"""Tables for groups of runs: the paper's (accuracy of methods on models and benchmarks, efficiency), and ours
(statistics of pairs, learning tax)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron_eqlen.evaluation.result import over_seeds
from megatron_eqlen.evaluation.statistics import detectable_difference, seed_difference
from megatron_eqlen.files import step_folders
from megatron_eqlen.metrics import (
    HARVEST_PAIRS_PER_STREAM,
    HARVEST_TRUNCATED_FRACTION,
    OBJECTIVE_REWARD_GAP,
    OBJECTIVE_SKIP_RATE,
)
from megatron_eqlen.objectives.build import build_minibatches
from megatron_eqlen.objectives.dynamic_sampling import trained
from megatron_eqlen.paper.learning_tax import Tax, learning_tax
from megatron_eqlen.recipe import Recipe
from megatron_eqlen.report.compare import efficiency_table
from megatron_eqlen.report.metrics import Records, mean_of_known, read_metrics
from megatron_eqlen.report.run_groups import BASE, Group
from megatron_eqlen.report.tables import Accuracy, Column, Difference
from megatron_eqlen.rollout.record.reader import read_step
from megatron_eqlen.tokens import COLUMNS, NUMBERS

METHOD, PER_HOUR, PER_TOKEN = "Method", "Samples/GPU-h", "Samples/1k tokens"
HEADINGS = {
    "method": METHOD,
    "tracks": "Parallel Tracks",
    "effective samples": "Eff. Samples",
    "GPU hours": "GPU Time (h)",
    "samples / GPU hour": PER_HOUR,
    "samples / 1k tokens": PER_TOKEN,
    "equal lengths": "Equal-Len.",
}
"""Headings of the paper's table 2, and one of ours."""


def accuracies(groups: Sequence[Group], benchmarks: Sequence[str] | None = None) -> list[dict[Column, Any]]:
    """Return the paper's tables 1 and 3: a row for each method, a column for each model and benchmark.

    ``benchmarks``: the benchmarks to show, in this order; default: all.
    """
    return _by_benchmark(groups, benchmarks, accuracy)


def differences(
    groups: Sequence[Group], baseline: str, benchmarks: Sequence[str] | None = None
) -> list[dict[Column, Any]]:
    """Return how much better each method is than ``baseline``, in the same columns."""
    base = {group.model: group for group in groups if group.method == baseline}

    def above(group: Group, benchmark: str) -> Difference | None:
        return difference(base[group.model], group, benchmark) if group.model in base else None

    return _by_benchmark([group for group in groups if group.method != baseline], benchmarks, above)


def learned(
    groups: Sequence[Group], control: str, benchmarks: Sequence[str] | None = None
) -> list[dict[Column, Any]]:
    """Return how much better each method is than itself on the recipe ``control``, whose rewards carry no
    information: the rest of its gain is drift."""
    drifted = {group.method: group for group in groups if group.model == control}

    def above(group: Group, benchmark: str) -> Difference | None:
        return difference(drifted[group.method], group, benchmark) if group.method in drifted else None

    graded = [group for group in groups if group.model != control and group.method != BASE]
    return _by_benchmark(graded, benchmarks, above)


def _by_benchmark(
    groups: Sequence[Group],
    benchmarks: Sequence[str] | None,
    value: Callable[[Group, str], Accuracy | Difference | None],
) -> list[dict[Column, Any]]:
    """Return a row for each method, with ``value(group, benchmark)`` for each model and benchmark."""
    models = list(dict.fromkeys(group.model for group in groups))
    named = dict.fromkeys(name for group in groups for run in group.runs for name in run.after)
    rows = []
    for method in dict.fromkeys(group.method for group in groups):
        row: dict[Column, Any] = {METHOD: "Base" if method == BASE else method}
        for model in models:
            mine = next((group for group in groups if (group.model, group.method) == (model, method)), None)
            for benchmark in benchmarks or named:
                row[model, benchmark] = value(mine, benchmark) if mine else None
        rows.append(row)
    return rows


def accuracy(group: Group, benchmark: str) -> Accuracy | None:
    """Return the accuracy; None if the runs were not evaluated on the benchmark."""
    results = group.results(benchmark)
    if not results:
        return None
    intervals = over_seeds(results)
    return Accuracy(intervals["paper"], intervals["headline"], len(results))


def difference(before: Group, after: Group, benchmark: str) -> Difference | None:
    """Return the difference, paired over the seeds that both have; None for fewer than two seeds."""
    theirs, ours = _means(before, benchmark), _means(after, benchmark)
    seeds = sorted(theirs.keys() & ours.keys())
    if len(seeds) < 2:
        return None
    pair = np.array([theirs[seed] for seed in seeds]), np.array([ours[seed] for seed in seeds])
    return Difference(seed_difference(*pair), detectable_difference(*pair), len(seeds))


def _means(group: Group, benchmark: str) -> dict[int, float]:
    """Return each seed's accuracy."""
    results = {run.recipe.seed: run.before if group.method == BASE else run.after for run in group.runs}
    return {
        seed: float(found[benchmark].scores.mean()) for seed, found in results.items() if benchmark in found
    }


def efficiency(groups: Sequence[Group]) -> list[dict[Column, Any]]:
    """Return the paper's table 2, with effective samples per generated token beside those per GPU hour; the
    last columns compare both with the first method: ratios of counts."""
    rows: list[dict[Column, Any]] = [
        {HEADINGS.get(name, name): value for name, value in row.items()} for row in efficiency_table(groups)
    ]
    for row in rows:
        for name, short in ((PER_HOUR, "GPU-h"), (PER_TOKEN, "tokens")):
            first = rows[0][name]
            row[f"x first, {short}"] = row[name] / first if first else None
    return rows


PAIR_STATISTICS = {
    "pairs a stream": (HARVEST_PAIRS_PER_STREAM, 1),
    "streams that reach the limit, %": (HARVEST_TRUNCATED_FRACTION, 100),
    "pairs with equal rewards, %": (OBJECTIVE_SKIP_RATE, 100),
    "reward of B: max less mean": (OBJECTIVE_REWARD_GAP, 1),
}
"""Title -> (metric, factor from the metric's unit to the title's)."""


def pairs(groups: Sequence[Group]) -> list[dict[Column, Any]]:
    """Return two rows for each method that has pairs: means over its seeds of their first and their last
    third of steps."""
    rows = []
    for group in groups:
        if group.method == BASE or group.runs[0].recipe.sampling != "equal_length":
            continue
        runs = [read_metrics(run.folder) for run in group.runs]
        for part, steps in (("first third", _first_third), ("last third", _last_third)):
            row: dict[Column, Any] = {METHOD: group.method, "of each run": part}
            for title, (metric, scale) in PAIR_STATISTICS.items():
                mean = mean_of_known(
                    mean_of_known(record.get(metric) for record in steps(records)) for records in runs
                )
                row[title] = None if mean is None else scale * mean
            rows.append(row)
    return rows


def _first_third(records: Records) -> Records:
    return records[: max(1, len(records) // 3)]


def _last_third(records: Records) -> Records:
    return records[-max(1, len(records) // 3) :]


TAX_STEPS = 8
"""Number of a run's steps that are read, evenly spread."""


def tax_of_run(folder: Path, recipe: Recipe) -> Tax:
    """Return the tax of some steps of a run; zero if it kept no rollouts."""
    steps = [step for _, step in step_folders(folder / "streams")]
    chosen = (
        np.unique(np.linspace(0, len(steps) - 1, min(TAX_STEPS, len(steps))).round().astype(int))
        if steps
        else []
    )
    return sum((tax_of_step(steps[number], recipe) for number in chosen), Tax())


def tax_of_step(folder: Path, recipe: Recipe) -> Tax:
    rollouts = trained(read_step(folder, without=COLUMNS.keys() - NUMBERS), recipe)
    batches, _ = build_minibatches(rollouts, recipe)
    return sum(map(learning_tax, batches), Tax())


def learning_taxes(groups: Sequence[Group]) -> list[dict[Column, Any]]:
    """Return a row for each method: its runs' shared prefixes, and the sums of their gradients; None where
    the runs kept no rollouts."""
    rows = []
    for group in groups:
        if group.method == BASE:
            continue
        tax = sum((tax_of_run(run.folder, run.recipe) for run in group.runs), Tax())
        values = {
            "shared tokens": tax.shared,
            "pushed both ways, %": 100 * tax.opposed_share,
            "cancelled, %": 100 * tax.cancelled_share,
            "gradient: mean": tax.mean,
            "gradient: deviation": tax.deviation,
        }
        rows.append({METHOD: group.method, **(values if tax.trained else dict.fromkeys(values))})
    return rows
