"""Curves of methods over steps, GPU hours, generated tokens or FLOPs: means and bands over their seeds."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from megatron_eqlen import metrics as m
from megatron_eqlen.evaluation.result import evaluation_files, histories, read_evaluations
from megatron_eqlen.experiments.schema import require_known
from megatron_eqlen.recipe.budget import UNITS
from megatron_eqlen.report.format import RESPONSE_LENGTH, REWARD
from megatron_eqlen.report.metrics import Columns

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ACCURACY = "Accuracy on {}, %"
"""Title of a benchmark's chart."""
POINTS = 40
"""Points of a curve: if the seeds' own points differ, each seed's curve is interpolated to the same ones."""
WINDOW = 10
"""Steps over which an oscillation is averaged."""
COLUMNS = 2
"""Charts in a row of a sheet."""
LETTERS = 125
"""Letters that are as wide as a sheet: longer names have several lines."""
DASHES = ("-", "--", ":", "-.")

Curve = tuple[np.ndarray, np.ndarray]
"""[n] places, rising, and the values there."""


@dataclass(frozen=True)
class MethodCurve:
    """Curve of one method: [n] places, means over its seeds, lowest and highest seed."""

    x: np.ndarray
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray


Charts = Mapping[str, Mapping[str, MethodCurve]]
"""Curves by title and method."""


def oscillation(norms: np.ndarray) -> np.ndarray:
    """Return how much a gradient norm [n] changes from step to step, 2 |x' - x| / (|x'| + |x|): a mean over
    the newest ``WINDOW`` steps; NaN at the first. 0: constant; 2: zero at every other step."""
    # [n - 1] sums and changes from each step to the next; both norms 0: no change.
    size = norms[1:] + norms[:-1]
    changes = np.where(size > 0, 2 * np.abs(np.diff(norms)) / np.where(size > 0, size, 1), 0.0)
    means = [changes[max(0, n - WINDOW) : n].mean() for n in range(1, len(changes) + 1)]
    return np.array([np.nan, *means])[: len(norms)]


MEASURES: dict[str, tuple[Sequence[str], Callable[[np.ndarray], np.ndarray]]] = {
    "Reward": (REWARD, np.asarray),
    "Length of responses, tokens": (RESPONSE_LENGTH, np.asarray),
    "Entropy, nats": (("loss/entropy",), np.asarray),
    "KL to the reference model": (("loss/ref_kl",), np.asarray),
    "Effective samples so far": (("objective/effective_samples",), np.cumsum),
    "Gradient norm": (("train/grad_norm",), np.asarray),
    "Oscillation of the gradient norm": (("train/grad_norm",), oscillation),
}
"""Names of each measure's metric, of which a run has recorded the first, and what is made of its values."""
READ = {*m.COST_METRICS.values(), *(name for names, _ in MEASURES.values() for name in names)}


def read_curves(folder: Path, axis: str) -> dict[str, Curve]:
    """Return a run's curves by title, along ``axis``, a key of ``UNITS``."""
    columns = Columns(folder, READ)
    steps = columns.steps
    # What the run had spent after each step.
    x = steps if axis == "steps" else np.nan_to_num(columns[m.COST_METRICS[axis]])
    files = evaluation_files(folder / "evaluation", columns.last.get("step", 0))
    curves = {}
    for name, rows in histories(read_evaluations(files)).items():
        # Step of an evaluation -> accuracy; step 0, before training, has spent nothing.
        at = {row.step: 100 * float(row.result.scores.mean()) for row in rows}
        begun, spent = np.append(0, steps), np.append(0.0, x)
        # An evaluation has a place only if its step was recorded.
        there = np.isin(begun, [*at])
        values = np.array([at[step] for step in begun[there].astype(int).tolist()])
        curves[ACCURACY.format(name)] = spent[there], values
    for title, (names, made) in MEASURES.items():
        values = columns.first_of(names)
        # Steps without the metric, and values that cannot be made there, leave no point.
        known = np.isfinite(values)
        values = made(values[known])
        curves[title] = x[known][np.isfinite(values)], values[np.isfinite(values)]
    return curves


def curves(
    methods: Mapping[str, Sequence[Path]], axis: str, titles: Sequence[str] | None = None
) -> tuple[str, Charts]:
    """Return the axis's name, and the charts of ``methods`` (name -> run folders of its seeds) along
    ``axis``, a key of ``UNITS``, or along steps if no run has spent any of it. ``titles``: the charts to
    draw; default: all that have points. Raises ValueError for another title."""
    runs = {name: [read_curves(folder, axis) for folder in folders] for name, folders in methods.items()}
    places = [curve[0] for seeds in runs.values() for run in seeds for curve in run.values()]
    if axis != "steps" and not any(x.any() for x in places):
        return curves(methods, "steps", titles)
    # Titles that have points in some run, each once, in order.
    known = dict.fromkeys(t for s in runs.values() for run in s for t, line in run.items() if len(line[0]))
    known = sorted(known, key=lambda title: title in MEASURES)  # accuracies first
    require_known("charts", titles, known)
    x_name = UNITS[axis] if axis != "steps" else "step"
    charts: dict[str, dict[str, MethodCurve]] = {}
    for title in titles or known:
        for name, seeds in runs.items():
            if line := over_seeds([run[title] for run in seeds if title in run]):
                charts.setdefault(title, {})[name] = line
            elif any(len(run[title][0]) for run in seeds if title in run):
                print(f"{title}, {name}: no curve: its seeds share no part of the axis ({x_name})\n")
    return x_name, charts


def over_seeds(seeds: Sequence[Curve]) -> MethodCurve | None:
    """Return the mean of the seeds' curves with the band from the lowest to the highest, where all have
    points; None if they share no place. Places are the seeds' own x if these are the same, else ``POINTS``
    between their common ends, to which each curve is interpolated linearly."""
    seeds = [curve for curve in seeds if len(curve[0])]
    own = [x for x, _ in seeds]
    first, last = max((x[0] for x in own), default=np.inf), min((x[-1] for x in own), default=0.0)
    if first > last:
        return None
    same = all(np.array_equal(x, own[0]) for x in own)
    grid = own[0] if same else np.linspace(first, last, POINTS)
    values = np.array([np.interp(grid, x, y) for x, y in seeds])
    return MethodCurve(grid, values.mean(axis=0), values.min(axis=0), values.max(axis=0))


def sheet(title: str, x_name: str, charts: Charts) -> str:
    """Return ``charts`` on one sheet, as SVG. Dashes and widths tell lines apart that coincide."""
    import matplotlib  # slow to import
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(name for lines in charts.values() for name in lines))
    labels = [textwrap.fill(name, LETTERS - 10) for name in names]
    rows = max(1, -(-len(charts) // COLUMNS))
    # A method's name may be a prompt's text: its dollars are no formula's.
    with matplotlib.rc_context({"font.size": 8, "axes.titlesize": 9, "text.parse_math": False}):
        height = 1.1 + 2.1 * rows + 0.13 * "\n".join(labels).count("\n")
        figure = Figure(figsize=(8, height), layout="constrained")
        figure.suptitle(title, fontsize=10, fontweight="bold")
        places = list(figure.subplots(rows, COLUMNS, squeeze=False).flat)
        drawn = {}
        for place, (name_of_chart, lines) in zip(places, charts.items(), strict=False):
            place.set(title=name_of_chart, xlabel=x_name)
            place.grid(alpha=0.3)
            for name, line in lines.items():
                n = names.index(name)
                # Ten colours times four dashes; thinner lines lie over thicker ones.
                style = {"color": f"C{n % 10}", "linestyle": DASHES[n % 4], "linewidth": 2 - 0.2 * (n % 4)}
                (drawn[name],) = place.plot(line.x, line.mean, **style)
                band = {"alpha": 0.16, "linewidth": 0, "gid": f"band {name}", "color": style["color"]}
                place.fill_between(line.x, line.low, line.high, **band)
        # The last row may have fewer charts than columns.
        for place in places[len(charts) :]:
            place.remove()
        columns = min([4, *(max(LETTERS // (len(name) + 10), 1) for name in names)])
        figure.legend([drawn[name] for name in names], labels, loc="outside lower center", ncols=columns)
        return svg(figure)


def svg(figure: Figure) -> str:
    """Return a figure of Matplotlib as SVG: the same text for the same figure, with text as text."""
    import matplotlib  # slow to import

    drawn = io.StringIO()
    # A fixed salt and no date: the same figure gives the same bytes.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "eqlen"}):
        figure.savefig(drawn, format="svg", metadata={"Date": None})
    return drawn.getvalue()
