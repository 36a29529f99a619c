"""Runs side by side, as the paper's tables: ``eqlen compare``.

run folders ──► groups (model, method) of seeds ──► accuracy, difference to a baseline, efficiency

Markdown on the terminal, everything as JSON where asked. Accuracies are over seeds: a run's samples are
averaged first. With a single seed its samples are the replicates, and the table says so.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from megatron_eqlen.evaluation.result import (
    EvaluationResult,
    compare_seeds,
    over_seeds,
    read_results,
)
from megatron_eqlen.evaluation.statistics import Interval
from megatron_eqlen.recipe import Recipe
from megatron_eqlen.recipe_load import load
from megatron_eqlen.report.format import compact
from megatron_eqlen.report.metrics import read_metrics

BASE = "base"
"""The model before training: every run's first evaluation."""
AFTER = Path("evaluation/after.json")


@dataclass(frozen=True)
class RunResult:
    """What a run folder says of a finished run."""

    folder: Path
    recipe: Recipe
    before: dict[str, EvaluationResult]
    after: dict[str, EvaluationResult]
    """By benchmark."""
    effective_samples: float
    generated_tokens: float
    gpu_hours: float

    @property
    def model(self) -> str:
        return Path(self.recipe.model.path).name


@dataclass(frozen=True)
class Group:
    """The runs of one method on one model; they differ in their seed."""

    model: str
    method: str
    runs: list[RunResult]

    def results(self, benchmark: str) -> list[EvaluationResult]:
        every = [run.before if self.method == BASE else run.after for run in self.runs]
        found = [results[benchmark] for results in every if benchmark in results]
        if self.method == BASE:  # runs of one seed have drawn the same samples of it
            return list({result.scores.tobytes(): result for result in found}.values())
        return found


def compare_runs(
    folders: Sequence[Path], baseline: str | None, interval: str, out: Path | None, say: Callable = print
) -> None:
    """Print the tables of ``folders`` (run folders, or folders that hold some), and write them to ``out``.

    ``baseline``: the method whose difference to every other is shown, by default the first one sampled
    independently. Runs that have not ended are named and left out. Raises ValueError where none has ended,
    for two runs of one seed, and for evaluations on different questions.
    """
    found = run_folders(folders)
    ended = [folder for folder in found if (folder / AFTER).is_file()]
    for folder in found:
        if folder not in ended:
            say(f"{folder}: left out, it has not ended ({AFTER} is not there)\n")
    if not ended:
        raise ValueError(f"{', '.join(map(str, folders))}: expected a run that has ended, found none")
    groups = group([read_run(folder) for folder in ended])
    tables = {
        "accuracy": accuracy_table(groups, interval),
        "difference": difference_table(groups, baseline or _default_baseline(groups)),
        "efficiency": efficiency_table(groups),
    }
    say("\n\n".join(markdown(rows) for rows in tables.values() if rows))
    if out is not None:
        out.write_text(json.dumps(tables, indent=1, default=_plain) + "\n", encoding="utf-8")


def run_folders(folders: Sequence[Path]) -> list[Path]:
    """The run folders among and below ``folders``."""
    found = [recipe.parent for folder in folders for recipe in sorted(folder.rglob("recipe.yaml"))]
    return list(dict.fromkeys(found))


def read_run(folder: Path) -> RunResult:
    """The results of a run that has ended."""
    before = folder / "evaluation" / "before.json"
    records = read_metrics(folder)

    def total(name: str) -> float:
        return sum(record.get(name) or 0.0 for record in records)

    return RunResult(
        folder,
        load(folder / "recipe.yaml"),
        _by_benchmark(before) if before.is_file() else {},
        _by_benchmark(folder / AFTER),
        total("objective/effective_samples"),
        total("harvest/generated_tokens"),
        (records[-1].get("time/gpu_hours") or 0.0) if records else 0.0,
    )


def group(runs: Sequence[RunResult]) -> list[Group]:
    """By model and method; each model's base first, then independent sampling, then equal lengths."""
    groups = []
    for model in dict.fromkeys(run.model for run in runs):
        mine = [run for run in runs if run.model == model]
        mine.sort(key=lambda run: (run.recipe.sampling == "equal_length", run.recipe.method))
        if any(run.before for run in mine):
            groups.append(Group(model, BASE, mine))
        for method in dict.fromkeys(run.recipe.method for run in mine):
            same = sorted((run for run in mine if run.recipe.method == method), key=_seed)
            _check_seeds(same)
            groups.append(Group(model, method, same))
    return groups


def accuracy_table(groups: Sequence[Group], interval: str = "headline") -> list[dict[str, Any]]:
    """A row a method, a column a model and benchmark: mean accuracy with its interval, in %."""
    models = list(dict.fromkeys(one.model for one in groups))
    rows = []
    for method in dict.fromkeys(one.method for one in groups):
        mine = [one for one in groups if one.method == method]
        row: dict[str, Any] = {
            "method": method,
            "seeds": None if method == BASE else max(len(one.runs) for one in mine),
        }
        for one in mine:
            for benchmark in _benchmarks(groups):
                column = benchmark if len(models) == 1 else f"{one.model} {benchmark}"
                results = one.results(benchmark)
                row[column] = over_seeds(results)[interval] if results else None
        rows.append(row)
    return rows


def difference_table(groups: Sequence[Group], baseline: str) -> list[dict[str, Any]]:
    """How much better each method is than ``baseline``, in points, paired by problem."""
    if baseline not in {one.method for one in groups}:
        known = ", ".join(dict.fromkeys(one.method for one in groups))
        raise ValueError(f"--baseline: expected one of {known}, found {baseline!r}")
    rows = []
    for one in (one for one in groups if one.method not in (baseline, BASE)):
        row: dict[str, Any] = {f"points above {baseline}": _label(one, groups)}
        for base in (other for other in groups if (other.model, other.method) == (one.model, baseline)):
            for benchmark in _benchmarks(groups):
                ours, theirs = one.results(benchmark), base.results(benchmark)
                row[benchmark] = compare_seeds(theirs, ours) if ours and theirs else None
        rows.append(row)
    return rows


def efficiency_table(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """The paper's efficiency comparison, a mean over each method's runs."""
    return [
        {
            "method": _label(one, groups),
            "tracks": one.runs[0].recipe.group_size,
            "effective samples": _mean(one, lambda run: run.effective_samples),
            "GPU hours": _mean(one, lambda run: run.gpu_hours),
            "samples / GPU hour": _mean(one, lambda run: _ratio(run.effective_samples, run.gpu_hours)),
            "samples / 1k tokens": _mean(
                one, lambda run: 1000 * _ratio(run.effective_samples, run.generated_tokens)
            ),
            "equal lengths": one.runs[0].recipe.sampling == "equal_length",
        }
        for one in groups
        if one.method != BASE
    ]


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """A GitHub table of rows with the same columns."""
    columns = list(dict.fromkeys(column for row in rows for column in row))
    cells = [[_text(row.get(column)) for column in columns] for row in rows]
    widths = [max(len(line[i]) for line in [columns, *cells]) for i in range(len(columns))]
    lines = [columns, ["-" * width for width in widths], *cells]
    return "\n".join(
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |"
        for line in lines
    )


def _label(one: Group, groups: Sequence[Group]) -> str:
    several = len({other.model for other in groups}) > 1
    return f"{one.model} {one.method}" if several else one.method


def _by_benchmark(path: Path) -> dict[str, EvaluationResult]:
    return {result.benchmark: result for result in read_results(path)}


def _benchmarks(groups: Sequence[Group]) -> list[str]:
    return list(dict.fromkeys(name for one in groups for run in one.runs for name in run.after))


def _default_baseline(groups: Sequence[Group]) -> str:
    return next((one.method for one in groups if one.method != BASE), BASE)


def _seed(run: RunResult) -> int:
    return run.recipe.seed


def _check_seeds(runs: list[RunResult]) -> None:
    for one, other in pairwise(runs):
        if _seed(one) == _seed(other):
            raise ValueError(
                f"{one.folder} and {other.folder}: expected runs of {one.recipe.method} to differ in their "
                f"seed, found {_seed(one)} twice"
            )


def _mean(one: Group, of: Callable[[RunResult], float]) -> float:
    return float(np.mean([of(run) for run in one.runs]))


def _ratio(above: float, below: float) -> float:
    return above / below if below else 0.0


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return compact(value)
    return "–" if value is None else str(value)


def _plain(value: Any) -> Any:
    assert isinstance(value, Interval)
    return asdict(value)
