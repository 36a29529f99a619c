"""Runs side by side, as the paper's tables: ``eqlen compare``.

run folders ──► groups (model, method) of seeds ──► accuracy, difference to a baseline, efficiency

Markdown on the terminal, everything as JSON if asked for. Accuracies are over seeds: a run's samples are
averaged first. With a single seed its samples are the replicates, and the table says so. Notes below the
tables report unequal budgets.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from megatron_eqlen.evaluation.result import compare_seeds, over_seeds
from megatron_eqlen.evaluation.statistics import Interval
from megatron_eqlen.recipe.budget import COSTS, UNITS
from megatron_eqlen.report.format import compact
from megatron_eqlen.report.run_groups import AFTER, BASE, Group, RunResult, group_runs, read_run, run_folders
from megatron_eqlen.report.tables import markdown_rows

UNEQUAL = 1.1
"""Ratio of costs from which budgets count as unequal. Not 1, because a run completes its last step."""


def compare_runs(
    folders: Sequence[Path], baseline: str | None, interval: str, out: Path | None, say: Callable = print
) -> None:
    """Print the tables of ``folders`` (run folders, or folders that hold some), and write them to ``out``.

    ``baseline``: the method whose difference to every other is shown, by default the first one sampled
    independently. Runs that have not ended are named and left out. Raises ValueError if none has ended, for
    two runs of one seed, and for evaluations on different questions.
    """
    found = run_folders(folders)
    ended = [folder for folder in found if (folder / AFTER).is_file()]
    for folder in found:
        if folder not in ended:
            say(f"{folder}: left out, it has not ended ({AFTER} is not there)\n")
    if not ended:
        raise ValueError(f"{', '.join(map(str, folders))}: expected a run that has ended, found none")
    groups = group_runs([read_run(folder) for folder in ended])
    notes = budget_notes(groups)
    tables = {
        "accuracy": accuracy_table(groups, interval),
        "difference": difference_table(groups, baseline or _default_baseline(groups)),
        "efficiency": efficiency_table(groups),
    }
    say("\n\n".join(markdown_rows(rows) for rows in tables.values() if rows))
    for note in notes:
        say(f"\n{note}")
    if out is not None:
        text = json.dumps(tables | {"notes": notes}, indent=1, default=_plain)
        out.write_text(text + "\n", encoding="utf-8")


def budget_notes(groups: Sequence[Group]) -> list[str]:
    """Return warnings for the reader of the tables: runs that ended before a limit, and unequal budgets."""
    methods = [group for group in groups if group.method != BASE]
    notes = [note for group in methods for run in group.runs if (note := _short(_label(group, groups), run))]
    cost = compared_cost(methods)
    for model in dict.fromkeys(group.model for group in methods):
        mine = [group for group in methods if group.model == model]
        costs = [_mean(group, lambda run: getattr(run.spent, cost)) for group in mine]
        if max(costs) > UNEQUAL * min(costs):
            spent = [
                f"{_label(group, groups)} {spent:.3g} {UNITS[cost]} in "
                f"{compact(_mean(group, lambda run: run.spent.steps))} steps"
                for group, spent in zip(mine, costs, strict=True)
            ]
            notes.append(f"Unequal budgets (means over runs): {'; '.join(spent)}")
    return notes


def compared_cost(groups: Sequence[Group]) -> str:
    """Return the recipe key of the cost at which runs are compared: the limit that most of them have, or GPU
    hours if none has one."""
    limited = [key for group in groups for run in group.runs for key, _ in run.recipe.budget.limits()]
    return max(COSTS, key=limited.count)


def _short(label: str, run: RunResult) -> str | None:
    """Return how a run ended before its limits; None if it reached them."""
    budget, outcome = run.recipe.budget, run.recipe.budget.outcome(run.spent)
    by = budget.ended_by(run.spent)
    if by is None:
        return f"{label} seed {run.recipe.seed} is not at its end: {outcome}"
    others = [UNITS[key] for key, _ in budget.limits() if key in COSTS]
    if by == "steps" and others:
        return f"{label} seed {run.recipe.seed} was cut short of its {' and '.join(others)}: {outcome}"
    return None


def accuracy_table(groups: Sequence[Group], interval: str = "headline") -> list[dict[str, Any]]:
    """Return one row for each method, one column for each model and benchmark: mean accuracy with interval,
    in %."""
    models = list(dict.fromkeys(group.model for group in groups))
    rows = []
    for method in dict.fromkeys(group.method for group in groups):
        mine = [group for group in groups if group.method == method]
        row: dict[str, Any] = {
            "method": method,
            "seeds": None if method == BASE else max(len(group.runs) for group in mine),
        }
        for group in mine:
            for benchmark in _benchmarks(groups):
                column = benchmark if len(models) == 1 else f"{group.model} {benchmark}"
                results = group.results(benchmark)
                row[column] = over_seeds(results)[interval] if results else None
        rows.append(row)
    return rows


def difference_table(groups: Sequence[Group], baseline: str) -> list[dict[str, Any]]:
    """Return how much better each method is than ``baseline``, in points, paired by problem."""
    if baseline not in {group.method for group in groups}:
        known = ", ".join(dict.fromkeys(group.method for group in groups))
        raise ValueError(f"--baseline: expected one of {known}, found {baseline!r}")
    rows = []
    for group in (group for group in groups if group.method not in (baseline, BASE)):
        row: dict[str, Any] = {f"points above {baseline}": _label(group, groups)}
        for base in (other for other in groups if (other.model, other.method) == (group.model, baseline)):
            for benchmark in _benchmarks(groups):
                ours, theirs = group.results(benchmark), base.results(benchmark)
                row[benchmark] = compare_seeds(theirs, ours) if ours and theirs else None
        rows.append(row)
    return rows


def efficiency_table(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """Return the paper's efficiency comparison, a mean over each method's runs."""
    return [
        {
            "method": _label(group, groups),
            "tracks": group.runs[0].recipe.group_size,
            "effective samples": _mean(group, lambda run: run.effective_samples),
            "GPU hours": _mean(group, lambda run: run.spent.gpu_hours),
            "samples / GPU hour": _mean(
                group, lambda run: _ratio(run.effective_samples, run.spent.gpu_hours)
            ),
            "samples / 1k tokens": _mean(
                group, lambda run: 1000 * _ratio(run.effective_samples, run.generated_tokens)
            ),
            "equal lengths": group.runs[0].recipe.sampling == "equal_length",
        }
        for group in groups
        if group.method != BASE
    ]


def _label(group: Group, groups: Sequence[Group]) -> str:
    several = len({other.model for other in groups}) > 1
    return f"{group.model} {group.method}" if several else group.method


def _benchmarks(groups: Sequence[Group]) -> list[str]:
    return list(dict.fromkeys(name for group in groups for run in group.runs for name in run.after))


def _default_baseline(groups: Sequence[Group]) -> str:
    return next((group.method for group in groups if group.method != BASE), BASE)


def _mean(group: Group, of: Callable[[RunResult], float]) -> float:
    return float(np.mean([of(run) for run in group.runs]))


def _ratio(above: float, below: float) -> float:
    return above / below if below else 0.0


def _plain(value: Any) -> Any:
    assert isinstance(value, Interval)
    return asdict(value)
