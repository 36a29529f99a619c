"""Drift: how length, entropy and accuracy of methods change from the start of a run to its end.

Length and accuracy are those of the evaluations before and after training, which ask the same questions,
whatever grader the rewards came from. Entropy is that of the training steps: the last ``WINDOW`` less the
first step, which samples the policy that all methods start from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any

import numpy as np

from megatron_eqlen.evaluation.result import EvaluationResult
from megatron_eqlen.evaluation.statistics import seed_difference
from megatron_eqlen.metrics import LOSS_ENTROPY
from megatron_eqlen.paper.figures import svg
from megatron_eqlen.paper.tables import METHOD
from megatron_eqlen.report.metrics import mean_of_known, read_metrics
from megatron_eqlen.report.run_groups import BASE, Group, RunResult
from megatron_eqlen.report.tables import Change, Column

WINDOW = 3
"""Steps at the end of a run over which the entropy is averaged."""
LENGTH = "Length, tokens"
Ends = tuple[float, float]
"""Values at the start and at the end of a run."""


def drifts(groups: Sequence[Group]) -> list[dict[Column, Any]]:
    """Return a row for each method: mean changes over its runs with 95% t intervals."""
    measures: dict[str, Callable[[RunResult], Ends | None]] = {
        LENGTH: lambda run: _tested(run, lambda result: result.mean_tokens),
        "Cut at the limit, points": lambda run: _tested(
            run, lambda result: 100 * result.verdict_fraction("truncated")
        ),
        "Entropy, nats": _entropy,
        "Accuracy, points": lambda run: _tested(run, lambda result: 100 * float(result.scores.mean())),
    }
    return [
        {
            METHOD: group.method,
            "Seeds": len(group.runs),
            **{title: _change([measure(run) for run in group.runs]) for title, measure in measures.items()},
        }
        for group in groups
        if group.method != BASE
    ]


def _tested(run: RunResult, of: Callable[[EvaluationResult], float]) -> Ends | None:
    """Return the means over the benchmarks that were evaluated before and after training."""
    common = run.before.keys() & run.after.keys()
    if not common:
        return None
    return fmean(of(run.before[name]) for name in common), fmean(of(run.after[name]) for name in common)


def _entropy(run: RunResult) -> Ends | None:
    records = read_metrics(run.folder)
    first = mean_of_known(record.get(LOSS_ENTROPY) for record in records[:1])
    last = mean_of_known(record.get(LOSS_ENTROPY) for record in records[-WINDOW:])
    return None if first is None or last is None else (first, last)


def _change(ends: Sequence[Ends | None]) -> Change | None:
    known = np.array([pair for pair in ends if pair is not None])
    return Change(seed_difference(known[:, 0], known[:, 1]), len(known)) if len(known) else None


def picture(tables: Sequence[tuple[str, Sequence[dict[Any, Any]]]]) -> str:
    """Return a picture of the changes of length, as SVG. Each (title, rows of ``drifts``) has a panel; two
    panels share a line."""
    import matplotlib  # slow to import
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"font.size": 8, "axes.titlesize": 9}):
        lines = [[*tables[start : start + 2]] for start in range(0, len(tables), 2)]
        heights = [1 + 0.25 * max(len(rows) for _, rows in line) for line in lines]
        figure = Figure(figsize=(8, sum(heights)), layout="constrained")
        panels = figure.subplots(
            len(lines), len(lines[0]), squeeze=False, sharex=True, height_ratios=heights
        ).flat
        for spare in panels[len(tables) :]:
            spare.remove()
        for panel, (title, rows) in zip(panels, tables, strict=False):
            found = [(row[METHOD], row[LENGTH].interval) for row in rows[::-1] if row[LENGTH] is not None]
            for place, (method, interval) in enumerate(found):
                colour = "#cc3311" if method.startswith("EqLen") else "#0077bb"
                panel.barh(place, interval.mean, color=colour, alpha=0.75)
                panel.plot([interval.low, interval.high], [place, place], color="black", linewidth=1)
            panel.set_yticks(range(len(found)), [method for method, _ in found])
            panel.axvline(0, color="black", linewidth=0.8)
            panel.set(title=title, xlabel="change of length, tokens")
        return svg(figure)
