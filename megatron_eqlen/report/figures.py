"""Curves of methods over steps, GPU hours, generated tokens or FLOPs: means and bands over their seeds."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_eqlen.metrics import (
    LOSS_ENTROPY,
    LOSS_REF_KL,
    OBJECTIVE_EFFECTIVE_SAMPLES,
    TRAIN_GRAD_NORM,
    spent,
)
from megatron_eqlen.recipe.budget import UNITS
from megatron_eqlen.report.evaluations import evaluations
from megatron_eqlen.report.format import RESPONSE_LENGTH, REWARD, first_of
from megatron_eqlen.report.metrics import Records, read_metrics

if TYPE_CHECKING:
    from matplotlib.figure import Figure

POINTS = 40
"""Points of a curve: if the seeds' own points differ, each seed's curve is interpolated to the same ones."""
WINDOW = 10
"""Steps over which an oscillation is averaged."""
COLUMNS = 2
"""Charts in a row of a sheet."""
DASHES = ("-", "--", ":", "-.")
Point = tuple[float, float]


@dataclass(frozen=True)
class MethodCurve:
    """Curve of one method: [n] places, means over its seeds, lowest and highest seed."""

    x: np.ndarray
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray


@dataclass(frozen=True)
class SheetChart:
    title: str
    x_name: str
    lines: Mapping[str, MethodCurve]
    """By method."""


@dataclass(frozen=True)
class Curves:
    """Curves over the steps of a run, read from its folder."""

    folder: Path

    @cached_property
    def records(self) -> Records:
        return read_metrics(self.folder)

    @cached_property
    def accuracies(self) -> dict[str, list[tuple[int, float]]]:
        """(step, accuracy in percent) pairs by benchmark."""
        done = self.records[-1]["step"] if self.records else 0
        by_benchmark: dict[str, dict[int, float]] = {}
        for _, step, results in evaluations(self.folder / "evaluation", done):
            for result in results:
                by_benchmark.setdefault(result.benchmark, {})[step] = 100 * float(result.scores.mean())
        return {name: sorted(points.items()) for name, points in by_benchmark.items()}

    def along(self, axis: str) -> dict[int, float]:
        """Return for each step the spending by its end, in the unit of ``axis``, a key of ``UNITS``."""
        return {0: 0.0} | {
            record["step"]: getattr(spent(record["step"], record), axis) for record in self.records
        }


Measure = Callable[[Curves], list[tuple[int, float]]]
"""(step, value) pairs of a run."""


def metric(*names: str) -> Measure:
    """Return the first of ``names`` that the run recorded."""

    def measure(run: Curves) -> list[tuple[int, float]]:
        values = ((record["step"], first_of(record, names)) for record in run.records)
        return [(step, value) for step, value in values if value is not None]

    return measure


def effective_samples(run: Curves) -> list[tuple[int, float]]:
    """Return the effective samples of all steps so far."""
    values = np.cumsum([record.get(OBJECTIVE_EFFECTIVE_SAMPLES) or 0.0 for record in run.records])
    return [(record["step"], float(value)) for record, value in zip(run.records, values, strict=True)]


def oscillation(run: Curves) -> list[tuple[int, float]]:
    """Return how much the gradient norm changes from one step to the next: 2 |x' - x| / (|x'| + |x|), a mean
    over the newest ``WINDOW`` steps. 0: constant; 2: it is zero at every other step."""
    changes: list[tuple[int, float]] = []
    for (_, before), (step, after) in pairwise(metric(TRAIN_GRAD_NORM)(run)):
        size = before + after
        changes.append((step, 2 * abs(after - before) / size if size else 0.0))
    newest = [changes[max(0, n - WINDOW + 1) : n + 1] for n in range(len(changes))]
    return [(part[-1][0], float(np.mean([change for _, change in part]))) for part in newest]


MEASURES: dict[str, Measure] = {
    "Reward": metric(*REWARD),
    "Length of responses, tokens": metric(*RESPONSE_LENGTH),
    "Entropy, nats": metric(LOSS_ENTROPY),
    "KL to the reference model": metric(LOSS_REF_KL),
    "Effective samples so far": effective_samples,
    "Gradient norm": metric(TRAIN_GRAD_NORM),
    "Oscillation of the gradient norm": oscillation,
}


def curves(
    methods: Mapping[str, Sequence[Path]], axis: str, titles: Sequence[str] | None = None
) -> list[SheetChart]:
    """Return the charts of ``methods`` (name -> run folders of its seeds) along ``axis``, a key of ``UNITS``,
    or along steps if no run has spent any of it.

    ``titles``: the charts to draw; default: all that have points. Raises ValueError for another title.
    """
    runs = {method: [Curves(folder) for folder in folders] for method, folders in methods.items()}
    every = [run for seeds in runs.values() for run in seeds]
    if not any(max(run.along(axis).values()) for run in every):
        axis = "steps"
    benchmarks = dict.fromkeys(name for run in every for name in run.accuracies)
    measures = {f"Accuracy on {name}, %": _accuracy(name) for name in benchmarks} | MEASURES
    if unknown := [title for title in titles or () if title not in measures]:
        raise ValueError(f"charts: expected some of {', '.join(measures)}, found {unknown[0]!r}")
    x_name = UNITS[axis] if axis != "steps" else "step"
    charts = [SheetChart(title, x_name, _lines(runs, measures[title], axis)) for title in titles or measures]
    return [chart for chart in charts if chart.lines]


def _accuracy(benchmark: str) -> Measure:
    return lambda run: run.accuracies.get(benchmark, [])


def _lines(runs: Mapping[str, Sequence[Curves]], measure: Measure, axis: str) -> dict[str, MethodCurve]:
    lines = {
        method: over_seeds([_points(run, measure, axis) for run in seeds]) for method, seeds in runs.items()
    }
    return {method: line for method, line in lines.items() if line is not None}


def _points(run: Curves, measure: Measure, axis: str) -> list[Point]:
    along = run.along(axis)
    return [(along[step], value) for step, value in measure(run) if step in along]


def over_seeds(seeds: Sequence[Sequence[Point]]) -> MethodCurve | None:
    """Return the mean of the seeds' curves with the band from the lowest to the highest, where all have
    points; None without any.

    Places are the seeds' own x if these are the same, else ``POINTS`` places between their common ends, to
    which each curve is interpolated linearly.
    """
    seeds = [points for points in seeds if points]
    if not seeds:
        return None
    own = [[x for x, _ in points] for points in seeds]
    if all(places == own[0] for places in own):
        grid = np.array(own[0])
    else:
        grid = np.linspace(max(places[0] for places in own), min(places[-1] for places in own), POINTS)
    values = np.array([np.interp(grid, [x for x, _ in curve], [y for _, y in curve]) for curve in seeds])
    return MethodCurve(grid, values.mean(axis=0), values.min(axis=0), values.max(axis=0))


def sheet(title: str, charts: Sequence[SheetChart]) -> str:
    """Return ``charts`` on one sheet, as SVG."""
    import matplotlib  # slow to import
    from matplotlib.figure import Figure

    rows = -(-len(charts) // COLUMNS)
    with matplotlib.rc_context({"font.size": 8, "axes.titlesize": 9}):
        figure = Figure(figsize=(8, 1.2 + 2.1 * rows), layout="constrained")
        figure.suptitle(title, fontsize=10, fontweight="bold")
        places = list(figure.subplots(rows, COLUMNS, squeeze=False).flat)
        names = list(dict.fromkeys(name for chart in charts for name in chart.lines))
        drawn = {}
        for place, chart in zip(places, charts, strict=False):
            place.set(title=chart.title, xlabel=chart.x_name)
            place.grid(alpha=0.3)
            for name, line in chart.lines.items():
                drawn[name] = _plot(place, name, line, names.index(name))
        for place in places[len(charts) :]:
            place.remove()
        figure.legend([drawn[name] for name in names], names, loc="outside lower center", ncols=4)
        return svg(figure)


def _plot(place: Any, name: str, line: MethodCurve, number: int) -> Any:
    """Plot a line with its band. Dashes and widths tell lines apart that coincide."""
    style = {"color": f"C{number % 10}", "linestyle": DASHES[number % 4], "linewidth": 2 - 0.2 * (number % 4)}
    (plotted,) = place.plot(line.x, line.mean, **style)
    band = {"alpha": 0.16, "linewidth": 0, "gid": f"band {name}"}
    place.fill_between(line.x, line.low, line.high, color=style["color"], **band)
    return plotted


def svg(figure: Figure) -> str:
    """Return a figure of Matplotlib as SVG: the same text for the same figure, with text as text."""
    import matplotlib  # slow to import

    drawn = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "eqlen"}):
        figure.savefig(drawn, format="svg", metadata={"Date": None})
    return drawn.getvalue()
