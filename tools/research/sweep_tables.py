"""Tables on the runs of a sweep beyond accuracy and efficiency, as Markdown.

    python -m tools.research.sweep_tables recipes/null_tiny.yaml
    python -m tools.research.sweep_tables recipes/tables_tiny.yaml --control null_coin

``drift``: change from before training to after it: means over seeds with 95% t intervals. Length and accuracy
are those of the evaluations, which ask the same questions, whatever grader the rewards came from; entropy is
that of the training steps. ``pairs``: statistics of pairs in the first and the last third of runs.
``learned``: points above the same method on the recipe ``--control``, whose rewards carry no information.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from megatron_eqlen.evaluation.result import EvaluationResult
from megatron_eqlen.evaluation.statistics import Interval, seed_difference
from megatron_eqlen.experiments.cells import Plan
from megatron_eqlen.experiments.compare import METHOD, SEEDS, by_benchmark, difference
from megatron_eqlen.experiments.results import ended_groups
from megatron_eqlen.experiments.run_groups import BASE, Group, RunResult
from megatron_eqlen.experiments.schema import load_sweep
from megatron_eqlen.metrics import (
    HARVEST_PAIRS_PER_STREAM,
    HARVEST_TRUNCATED_FRACTION,
    LOSS_ENTROPY,
    OBJECTIVE_REWARD_GAP,
    OBJECTIVE_SKIP_RATE,
)
from megatron_eqlen.report.format import Rows, markdown_rows
from megatron_eqlen.report.metrics import Columns

LENGTH = "Length, tokens"
NEWEST = 3
"""Steps at the end of a run over which entropy is averaged."""
Ends = tuple[float, float]
"""Values at the start and at the end of a run."""


@dataclass(frozen=True)
class Change:
    """Change of a quantity during runs, a mean over their seeds."""

    interval: Interval
    seeds: int

    def __str__(self) -> str:
        """Format the change: ``+12.3 [+8.1, +16.5]``; without an interval for a single seed."""
        mean, low, high = self.interval.mean, self.interval.low, self.interval.high
        return f"{mean:+.3g}" if self.seeds == 1 else f"{mean:+.3g} [{low:+.3g}, {high:+.3g}]"


def drifts(groups: Sequence[Group]) -> Rows:
    """Return a row for each method: mean changes over its runs with 95% t intervals."""
    measures: dict[str, Callable[[RunResult], Ends | None]] = {
        LENGTH: lambda run: _tested(run, lambda result: result.mean_tokens),
        "Cut at the limit, points": lambda run: _tested(run, lambda r: 100 * r.verdict_fraction("truncated")),
        "Entropy, nats": _entropy,
        "Accuracy, points": lambda run: _tested(run, lambda result: 100 * float(result.scores.mean())),
    }
    return [
        {METHOD: group.method, SEEDS: len(group.runs)}
        | {title: _change([measure(run) for run in group.runs]) for title, measure in measures.items()}
        for group in groups
    ]


def _tested(run: RunResult, of: Callable[[EvaluationResult], float]) -> Ends | None:
    """Return the means over the benchmarks that were evaluated before and after training."""
    common = run.before.keys() & run.after.keys()
    if not common:
        return None
    return fmean(of(run.before[name]) for name in common), fmean(of(run.after[name]) for name in common)


def _entropy(run: RunResult) -> Ends | None:
    entropy = Columns(run.folder, [LOSS_ENTROPY])[LOSS_ENTROPY]
    first, last = mean_of_known(entropy[:1]), mean_of_known(entropy[-NEWEST:])
    return None if first is None or last is None else (first, last)


def mean_of_known(values: np.ndarray) -> float | None:
    """Return the mean of the finite values; None if there is none."""
    known = values[np.isfinite(values)]
    return float(known.mean()) if len(known) else None


def _change(ends: Sequence[Ends | None]) -> Change | None:
    known = np.array([pair for pair in ends if pair is not None])
    return Change(seed_difference(known[:, 0], known[:, 1]), len(known)) if len(known) else None


PAIR_STATISTICS = {
    "pairs a stream": (HARVEST_PAIRS_PER_STREAM, 1),
    "streams that reach the limit, %": (HARVEST_TRUNCATED_FRACTION, 100),
    "pairs with equal rewards, %": (OBJECTIVE_SKIP_RATE, 100),
    "reward of B: max less mean": (OBJECTIVE_REWARD_GAP, 1),
}
"""Title -> (metric, factor from the metric's unit to the title's)."""


def pairs(groups: Sequence[Group]) -> Rows:
    """Return two rows for each method that has pairs: means over the first and the last third of steps."""
    rows = []
    for group in groups:
        if group.runs[0].recipe.sampling != "equal_length":
            continue
        names = [metric for metric, _ in PAIR_STATISTICS.values()]
        runs = [Columns(run.folder, names) for run in group.runs]
        for part in ("first", "last"):
            row: dict[str, Any] = {METHOD: group.method, "third of each run": part}
            for title, (metric, scale) in PAIR_STATISTICS.items():
                thirds = [max(1, len(run.steps) // 3) for run in runs]
                chosen = [
                    run[metric][:n] if part == "first" else run[metric][-n:]
                    for run, n in zip(runs, thirds, strict=True)
                ]
                means = [mean_of_known(values) for values in chosen]
                mean = mean_of_known(np.array(means, float))
                row[title] = None if mean is None else scale * mean
            rows.append(row)
    return rows


def learned(groups: Sequence[Group], controls: Sequence[Group]) -> Rows:
    """Return how much better each method is than itself in ``controls``: the rest of its gain is drift."""
    drifted = {group.method: group for group in controls}
    chosen = [group for group in groups if group.method in drifted]
    return by_benchmark(chosen, None, lambda group, name: difference(drifted[group.method], group, name))


KINDS = {"drift": drifts, "pairs": pairs}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("sweep", type=Path)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=["drift", "pairs"])
    parser.add_argument("--control", help="recipe of the sweep, for `learned`")
    args = parser.parse_args()
    plan = Plan(load_sweep(args.sweep))
    models: dict[str, list[Group]] = {}
    for group in ended_groups(plan):
        if group.method != BASE:
            labelled = Group(group.model, plan.sweep.label(group.method), group.runs)
            models.setdefault(group.model, []).append(labelled)
    for model, groups in models.items():
        for kind in args.kinds:
            print(f"\n### {model}: {kind}\n\n{markdown_rows(KINDS[kind](groups))}")
        if args.control in models and model != args.control:
            print(f"\n### {model}: points above {args.control}\n")
            print(markdown_rows(learned(groups, models[args.control])))


if __name__ == "__main__":
    main()
