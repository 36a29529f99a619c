"""The paper's tables of groups of runs: accuracy of methods on models and benchmarks, and efficiency."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron_eqlen.evaluation.result import over_seeds
from megatron_eqlen.report.compare import efficiency_table
from megatron_eqlen.report.run_groups import BASE, Group
from megatron_eqlen.report.tables import Accuracy, Column

METHOD, PER_HOUR = "Method", "Samples/GPU-h"
HEADINGS = {
    "method": METHOD,
    "tracks": "Parallel Tracks",
    "effective samples": "Eff. Samples",
    "GPU hours": "GPU Time (h)",
    "samples / GPU hour": PER_HOUR,
    "samples / 1k tokens": "Samples/1k tokens",
    "equal lengths": "Equal-Len.",
}
"""The paper's headings of its table 2, and one of ours."""


def accuracies(groups: Sequence[Group], benchmarks: Sequence[str] | None = None) -> list[dict[Column, Any]]:
    """The paper's tables 1 and 3: a row for each method, a column for each model and benchmark.

    ``benchmarks``: which, in this order; default: all.
    """
    models = list(dict.fromkeys(one.model for one in groups))
    named = dict.fromkeys(name for one in groups for run in one.runs for name in run.after)
    rows = []
    for method in dict.fromkeys(one.method for one in groups):
        row: dict[Column, Any] = {METHOD: "Base" if method == BASE else method}
        for model in models:
            mine = next((one for one in groups if (one.model, one.method) == (model, method)), None)
            for benchmark in benchmarks or named:
                row[model, benchmark] = accuracy(mine, benchmark) if mine else None
        rows.append(row)
    return rows


def accuracy(group: Group, benchmark: str) -> Accuracy | None:
    """None where the runs were not evaluated on it."""
    results = group.results(benchmark)
    if not results:
        return None
    intervals = over_seeds(results)
    return Accuracy(intervals["paper"], intervals["headline"], len(results))


def efficiency(groups: Sequence[Group]) -> list[dict[Column, Any]]:
    """The paper's table 2, and effective samples of generated tokens beside those of GPU hours; the last
    column compares them with the first method."""
    rows: list[dict[Column, Any]] = [
        {HEADINGS.get(name, name): value for name, value in row.items()} for row in efficiency_table(groups)
    ]
    for row in rows:
        first = rows[0][PER_HOUR]
        row["x first"] = row[PER_HOUR] / first if first else None
    return rows
