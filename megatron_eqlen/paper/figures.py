"""Curves of methods over steps, GPU hours, generated tokens or FLOPs: means and bands over their seeds."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_eqlen.metrics import (
    LOSS_ENTROPY,
    LOSS_REF_KL,
    OBJECTIVE_EFFECTIVE_SAMPLES,
    TRAIN_GRAD_NORM,
    spent,
)
from megatron_eqlen.paper.tables import METHOD
from megatron_eqlen.recipe.budget import UNITS
from megatron_eqlen.report.charts import Chart, Point, Series
from megatron_eqlen.report.evaluations import evaluations
from megatron_eqlen.report.format import RESPONSE_LENGTH, REWARD, first_of
from megatron_eqlen.report.metrics import Records, mean_of_known, read_metrics
from megatron_eqlen.report.run_groups import BASE, Group
from megatron_eqlen.report.tables import Column

if TYPE_CHECKING:
    from matplotlib.figure import Figure

POINTS = 40
"""Points of a curve: if the seeds' own points differ, each seed's curve is interpolated to the same ones."""
WINDOW = 10
"""Steps over which an oscillation, and the end of a curve, is averaged."""
COLUMNS = 2
"""Charts in a row of a sheet."""
DASHES = ("-", "--", ":", "-.")


@dataclass(frozen=True)
class Curves:
    """Metrics of one run over steps."""

    records: Records
    accuracies: dict[str, list[tuple[int, float]]]
    """(step, accuracy) pairs by benchmark."""

    def along(self, axis: str) -> dict[int, float]:
        """Return for each step the spending by its end, in the unit of ``axis``, a key of ``UNITS``."""
        return {0: 0.0} | {
            record["step"]: getattr(spent(record["step"], record), axis) for record in self.records
        }


def read_curves(folder: Path) -> Curves:
    """Read the curves of a run's folder."""
    records = read_metrics(folder)
    done = records[-1]["step"] if records else 0
    accuracies: dict[str, dict[int, float]] = {}
    for _, step, results in evaluations(folder / "evaluation", done):
        for result in results:
            accuracies.setdefault(result.benchmark, {})[step] = 100 * float(result.scores.mean())
    return Curves(records, {name: sorted(points.items()) for name, points in accuracies.items()})


# ---- what is drawn --------------------------------------------------------------------------------------

Measure = Callable[[Curves], list[tuple[int, float]]]
"""(step, value) pairs of a run."""


def metric(*names: str) -> Measure:
    """Return the first of ``names`` that the run recorded."""

    def measure(curves: Curves) -> list[tuple[int, float]]:
        found = ((record["step"], first_of(record, names)) for record in curves.records)
        return [(step, value) for step, value in found if value is not None]

    return measure


def summed(name: str) -> Measure:
    """Return the sum of a metric over the steps so far."""

    def measure(curves: Curves) -> list[tuple[int, float]]:
        values = np.cumsum([record.get(name) or 0.0 for record in curves.records])
        return [(record["step"], float(value)) for record, value in zip(curves.records, values, strict=True)]

    return measure


def oscillation(name: str) -> Measure:
    """Return how much a metric changes from one step to the next: 2 |x' - x| / (|x'| + |x|), a mean over the
    newest ``WINDOW`` steps. 0: constant; 2: it changes its sign, or is zero at every other step."""

    def measure(curves: Curves) -> list[tuple[int, float]]:
        changes: list[tuple[int, float]] = []
        for (_, before), (step, after) in pairwise(metric(name)(curves)):
            size = abs(before) + abs(after)
            changes.append((step, 2 * abs(after - before) / size if size else 0.0))
        newest = [changes[max(0, n - WINDOW + 1) : n + 1] for n in range(len(changes))]
        return [(part[-1][0], float(np.mean([change for _, change in part]))) for part in newest]

    return measure


EFFECTIVE = "Effective samples so far"
MEASURES: dict[str, Measure] = {
    "Reward": metric(*REWARD),
    "Length of responses, tokens": metric(*RESPONSE_LENGTH),
    "Entropy, nats": metric(LOSS_ENTROPY),
    "KL to the reference model": metric(LOSS_REF_KL),
    EFFECTIVE: summed(OBJECTIVE_EFFECTIVE_SAMPLES),
    "Gradient norm": metric(TRAIN_GRAD_NORM),
    "Oscillation of the gradient norm": oscillation(TRAIN_GRAD_NORM),
}


def figures(groups: Sequence[Group]) -> dict[str, list[Chart]]:
    """Return the charts of methods on one model, by x axis; an axis without numbers is left out."""
    runs = {
        group.method: [read_curves(run.folder) for run in group.runs]
        for group in groups
        if group.method != BASE
    }
    benchmarks = dict.fromkeys(
        name for seeds in runs.values() for curves in seeds for name in curves.accuracies
    )
    measures = {f"Accuracy on {name}, %": _accuracy(name) for name in benchmarks} | MEASURES
    drawn = {
        axis: [_chart(title, runs, measure, axis) for title, measure in measures.items()]
        for axis in UNITS
        if any(max(curves.along(axis).values()) for seeds in runs.values() for curves in seeds)
    }
    return {
        axis: [chart for chart in charts if any(series.points for series in chart.series)]
        for axis, charts in drawn.items()
    }


def sheet(title: str, charts: Sequence[Chart]) -> str:
    """Return ``charts`` on one sheet for documents, as SVG; their series have the same names in the same
    order."""
    import matplotlib  # slow to import
    from matplotlib.figure import Figure

    rows = -(-len(charts) // COLUMNS)
    with matplotlib.rc_context({"font.size": 8, "axes.titlesize": 9}):
        figure = Figure(figsize=(8, 1.2 + 2.1 * rows), layout="constrained")
        figure.suptitle(title, fontsize=10, fontweight="bold")
        places = list(figure.subplots(rows, COLUMNS, squeeze=False).flat)
        lines = {}
        for place, chart in zip(places, charts, strict=False):
            place.set_title(chart.title)
            place.set_xlabel(chart.x_name)
            place.grid(alpha=0.3)
            for number, series in enumerate(chart.series):
                if series.points:
                    lines[series.name] = _plot(place, series, number)
        for place in places[len(charts) :]:
            place.remove()
        names = [series.name for series in charts[0].series if series.name in lines]
        figure.legend([lines[name] for name in names], names, loc="outside lower center", ncols=4)
        return svg(figure)


def svg(figure: Figure) -> str:
    """Return a figure of Matplotlib as SVG: the same text for the same figure, with text as text."""
    import matplotlib  # slow to import

    drawn = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "eqlen"}):
        figure.savefig(drawn, format="svg", metadata={"Date": None})
    return drawn.getvalue()


def _plot(place: Any, series: Series, number: int) -> Any:
    """Plot a line with its band. Dashes and widths tell lines apart that coincide."""
    x, y = zip(*series.points, strict=True)
    style = {"color": f"C{number % 10}", "linestyle": DASHES[number % 4], "linewidth": 2 - 0.2 * (number % 4)}
    (line,) = place.plot(x, y, **style)
    if series.intervals:
        low, high = zip(*series.intervals, strict=True)
        band = {"alpha": 0.16, "linewidth": 0, "gid": f"band {series.name}"}
        place.fill_between(x, low, high, color=line.get_color(), **band)
    return line


def ends(groups: Sequence[Group]) -> list[dict[Column, Any]]:
    """Return the end of each method's curves: means over its seeds and their last ``WINDOW`` steps; and for
    the final evaluation the length of the responses, and the share cut at the limit."""
    rows = []
    for group in groups:
        if group.method != BASE:
            row: dict[Column, Any] = {METHOD: group.method}
            row |= {title: _end(group, measure) for title, measure in MEASURES.items() if title != EFFECTIVE}
            tested = [result for run in group.runs for result in run.after.values()]
            row["Test: length, tokens"] = mean_of_known(result.mean_tokens for result in tested)
            cut = mean_of_known(result.verdict_fraction("truncated") for result in tested)
            rows.append(row | {"Test: cut, %": None if cut is None else 100 * cut})
    return rows


def _end(group: Group, measure: Measure) -> float | None:
    curves = [measure(read_curves(run.folder)) for run in group.runs]
    found = [fmean(value for _, value in points[-WINDOW:]) for points in curves if points]
    return mean_of_known(found)


def _accuracy(benchmark: str) -> Measure:
    return lambda curves: curves.accuracies.get(benchmark, [])


def _chart(title: str, runs: dict[str, list[Curves]], measure: Measure, axis: str) -> Chart:
    parts = [
        over_seeds(method, [_points(curves, measure, axis) for curves in seeds])
        for method, seeds in runs.items()
    ]
    return Chart(title, parts, UNITS[axis] if axis != "steps" else "step")


def _points(curves: Curves, measure: Measure, axis: str) -> list[Point]:
    along = curves.along(axis)
    return [(along[step], value) for step, value in measure(curves) if step in along]


def over_seeds(name: str, seeds: Sequence[Sequence[Point]]) -> Series:
    """Return the mean of the seeds' curves with the band from the lowest to the highest, where all have
    points.

    Points are the seeds' own x if these are the same, else ``POINTS`` places between their common ends, to
    which each curve is interpolated linearly.
    """
    seeds = [points for points in seeds if points]
    if not seeds:
        return Series(name, [])
    own = [[x for x, _ in points] for points in seeds]
    if all(places == own[0] for places in own):
        grid = np.array(own[0])
    else:
        grid = np.linspace(max(places[0] for places in own), min(places[-1] for places in own), POINTS)
    values = np.array([np.interp(grid, [x for x, _ in curve], [y for _, y in curve]) for curve in seeds])
    low, high = values.min(axis=0), values.max(axis=0)
    points = list(zip(grid.tolist(), values.mean(axis=0).tolist(), strict=True))
    return Series(name, points, list(zip(low.tolist(), high.tolist(), strict=True)))
