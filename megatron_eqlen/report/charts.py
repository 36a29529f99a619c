"""Charts over steps: their titles, series and numbers. ``plots.py`` draws them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np

from megatron_eqlen.metrics import (
    HARVEST_SEGMENT_LENGTH,
    HARVEST_TRUNCATED_FRACTION,
    LOSS_CLIP_FRACTION_HIGH,
    LOSS_CLIP_FRACTION_LOW,
    LOSS_ENTROPY,
    LOSS_REF_KL,
    OBJECTIVE_SEGMENT_LENGTH_MEAN,
    OBJECTIVE_SKIP_RATE,
    OBJECTIVE_ZERO_ADVANTAGE_FRACTION,
    PACKING_EXPANDED_TOKENS,
    PACKING_UNIQUE_TOKENS,
    STAGES,
    STALENESS_MAX,
    STALENESS_MEAN,
    TIME_STEP,
    TRAIN_GRAD_NORM,
    spent,
)
from megatron_eqlen.recipe.budget import Budget
from megatron_eqlen.report.drawing import STAGES as LANED
from megatron_eqlen.report.evaluations import Evaluation
from megatron_eqlen.report.format import (
    MISMATCH,
    PAIRS,
    RESPONSE_LENGTH,
    REWARD,
    ROLLOUT_SPEED,
    TRAINING_SPEED,
    compact,
    duration,
)
from megatron_eqlen.report.metrics import Columns
from megatron_eqlen.report.progress import STEPS_FOR_ETA

MAX_POINTS = 1000
"""Most points of a series; longer ones are averaged in equal groups of neighbours: no chart has more
pixels."""

COLOURS = (
    "#3f7ad6", "#d9822b", "#379a72", "#a65bbd", "#c95567", "#8a8f98", "#4aa3b5", "#9a7350", "#9cab2a",
    "#e07fb4",
)  # fmt: skip
"""Colours of series, that can be told apart on light and on dark ground."""
COLOURED = [*LANED, *(stage for stage in STAGES if stage not in LANED)]
"""Stages in the order of their colours, which the picture of the last steps uses as well."""

Point = tuple[float, float]
Names = tuple[str, ...]

PERCENT = ", % of "
"""Part of a series' name: its metric is a share of the quantity named after it, and is drawn in percent."""
CHARTS: dict[str, dict[str, Names]] = {
    "Reward": {"mean": REWARD},
    "Pairs per stream": {"pairs": PAIRS},
    "Length, tokens": {
        "responses": RESPONSE_LENGTH,
        "segments": (HARVEST_SEGMENT_LENGTH, OBJECTIVE_SEGMENT_LENGTH_MEAN),
    },
    "Shares, %": {
        "equal rewards, % of pairs": (OBJECTIVE_SKIP_RATE,),
        "without advantage, % of comparison units": (OBJECTIVE_ZERO_ADVANTAGE_FRACTION,),
        "truncated, % of streams or completions": (HARVEST_TRUNCATED_FRACTION,),
    },
    "Entropy, nats": {"entropy": (LOSS_ENTROPY,)},
    "KL to the reference model, nats": {"KL": (LOSS_REF_KL,)},
    "Mismatch KL, engine to trainer, nats": {"KL": MISMATCH},
    "Staleness of trained tokens, updates": {"mean": (STALENESS_MEAN,), "largest": (STALENESS_MAX,)},
    "Gradient norm": {"norm": (TRAIN_GRAD_NORM,)},
    "Clipped tokens, %": {
        "low, % of tokens": (LOSS_CLIP_FRACTION_LOW,),
        "high, % of tokens": (LOSS_CLIP_FRACTION_HIGH,),
    },
    "Tokens per second": {"rollout": ROLLOUT_SPEED, "training": TRAINING_SPEED},
    "Tokens trained": {
        "in token trees": (PACKING_UNIQUE_TOKENS,),
        "if every side had its own prefix": (PACKING_EXPANDED_TOKENS,),
    },
}
"""Each chart's title, with its series and the names of their metrics. Series without a value are left out."""

RARE = {
    "KL to the reference model, nats", "Staleness of trained tokens, updates", "Clipped tokens, %",
    "Tokens trained",
}  # fmt: skip
"""Charts that a page shows on demand."""
METRICS = {
    TIME_STEP,
    *(f"time/{stage}" for stage in STAGES),
    *(name for lines in CHARTS.values() for names in lines.values() for name in names),
}
"""All metrics that a page draws."""


@dataclass(frozen=True)
class Series:
    name: str
    points: Sequence[Point]
    """(x, value) pairs, x rising."""
    intervals: Sequence[Point] = ()
    """(low, high) of each point, drawn as a band; empty for none."""
    colour: int | None = None
    """Number of the colour; default: the series' place in the chart."""
    remark: str = ""
    """Text beside the name in the legend; default: the last value."""

    @property
    def last(self) -> str:
        return self.remark or (compact(self.points[-1][1]) if self.points else "–")


@dataclass(frozen=True)
class Chart:
    title: str
    series: Sequence[Series]
    x_name: str = "step"
    seconds: tuple[np.ndarray, np.ndarray] | None = None
    """Steps, and seconds since the run's start at their ends; None if x is not a step of one run."""
    stacked: bool = False
    """The series are parts of a whole and have the same x."""

    @property
    def rare(self) -> bool:
        """True for a chart that a page shows on demand."""
        return self.title in RARE

    def columns(self) -> dict[str, Any]:
        """Return ``x``, and for series number n ``y<n>`` and where it has intervals ``low<n>``, ``high<n>``:
        float arrays over the union of all x, NaN where a series has no value. Besides ``smooth<n>``, the
        moving average; ``hover``, a height between the series; and ``clock``, times as text."""
        drawn = [_averaged(series) for series in self.series]
        xs = np.array(sorted({x for series in drawn for x, _ in series.points}))
        columns: dict[str, Any] = {"x": xs}
        for n, series in enumerate(drawn):
            places = np.searchsorted(xs, [x for x, _ in series.points])
            columns[f"y{n}"] = _spread(places, [y for _, y in series.points], len(xs))
            columns[f"smooth{n}"] = _smoothed(columns[f"y{n}"])
            for side, name in enumerate(("low", "high") if series.intervals else ()):
                columns[f"{name}{n}"] = _spread(places, [pair[side] for pair in series.intervals], len(xs))
        values = np.array([columns[f"y{n}"] for n in range(len(drawn))])
        counts = np.isfinite(values).sum(axis=0)
        columns["hover"] = np.nansum(values, axis=0) / np.maximum(counts, 1)
        if self.seconds is not None:
            columns["clock"] = [duration(second) for second in np.interp(xs, *self.seconds)]
        return columns


def _spread(places: np.ndarray, values: Sequence[float], length: int) -> np.ndarray:
    spread = np.full(length, np.nan)
    spread[places] = values
    spread[~np.isfinite(spread)] = np.nan
    return spread


def _smoothed(values: np.ndarray) -> np.ndarray:
    """Return the mean of each value with its neighbours, a twentieth of all to each side."""
    reach = max(len(values) // 40, 1)
    kernel, known = np.ones(2 * reach + 1), np.isfinite(values)
    sums = np.convolve(np.where(known, values, 0.0), kernel)[reach:-reach]
    counts = np.convolve(known.astype(float), kernel)[reach:-reach]
    return np.where(known, sums / np.maximum(counts, 1.0), np.nan)


def _averaged(series: Series) -> Series:
    """Return at most ``MAX_POINTS`` points, each the mean of neighbours."""
    if len(series.points) <= MAX_POINTS or series.intervals:
        return series
    size = math.ceil(len(series.points) / MAX_POINTS)
    points = np.array(series.points, float)
    groups = np.split(points, range(size, len(points), size))
    means = [(x, y) for x, y in (group.mean(axis=0).tolist() for group in groups)]
    return Series(series.name, means, colour=series.colour, remark=series.last)


# ---- what a run measured --------------------------------------------------------------------------------


def charts(columns: Columns, evaluations: Sequence[Evaluation]) -> list[Chart]:
    """Return the charts: accuracies with their intervals, then ``CHARTS``."""
    seconds = _seconds(columns)
    drawn = [_accuracy_chart(evaluations, seconds)] if evaluations else []
    for title, lines in CHARTS.items():
        averaged = [_averaged(Series(name, _points(columns, name, metric))) for name, metric in lines.items()]
        if shown := [series for series in averaged if series.points]:
            drawn.append(Chart(title, shown, seconds=seconds))
    return drawn


def stages(columns: Columns) -> Chart | None:
    """Return the seconds of every stage of every step, the longest at the bottom; None without records."""
    taken = {stage: np.nan_to_num(columns[f"time/{stage}"]) for stage in STAGES}
    totals = {stage: float(seconds.sum()) for stage, seconds in taken.items() if seconds.any()}
    if not totals:
        return None
    overall = sum(totals.values())
    series = [
        _averaged(
            Series(
                stage,
                list(zip(columns.steps.tolist(), taken[stage].tolist(), strict=True)),
                colour=COLOURED.index(stage),
                remark=f"{compact(total / len(columns.steps))} s, {total / overall:.0%}",
            )
        )
        for stage, total in sorted(totals.items(), key=lambda item: -item[1])
    ]
    return Chart("Seconds per step by stage", series, seconds=_seconds(columns), stacked=True)


def facts(columns: Columns, budget: Budget) -> list[tuple[str, str, str]]:
    """Return (name, value, remark) of the boxes below the headline."""
    boxes = []
    if reward := measured(columns, REWARD):
        share = max(len(reward) // 5, 1)
        first, last = (fmean(y for _, y in part) for part in (reward[:share], reward[-share:]))
        boxes.append(("reward", f"{compact(first)} → {compact(last)}", f"mean of {share} steps at each end"))
    for name, metric in (("rollout", ROLLOUT_SPEED), ("training", TRAINING_SPEED)):
        if values := measured(columns, metric):
            boxes.append((name, f"{compact(fmean(y for _, y in values))} tokens/s", "mean over steps"))
    if seconds := measured(columns, (TIME_STEP,)):
        newest = [y for _, y in seconds[-STEPS_FOR_ETA:]]
        remark = f"mean of the newest {len(newest)}; {duration(sum(y for _, y in seconds))} in all steps"
        boxes.append(("time per step", f"{compact(fmean(newest))} s", remark))
    if columns.last:
        outcome = budget.outcome(spent(columns.last["step"], columns.last))
        boxes.append(("progress", outcome, f"limit: {budget.describe()}"))
    return boxes


def measured(columns: Columns, names: Names) -> list[Point]:
    """Return (step, value) of the first of ``names`` that the run measured, where it is a number."""
    for name in names:
        known = np.isfinite(columns[name])
        if known.any():
            return list(zip(columns.steps[known].tolist(), columns[name][known].tolist(), strict=True))
    return []


def _points(columns: Columns, name: str, metric: Names) -> list[Point]:
    scale = 100 if PERCENT in name else 1
    return [(step, scale * value) for step, value in measured(columns, metric)]


def _seconds(columns: Columns) -> tuple[np.ndarray, np.ndarray] | None:
    """Return the steps, and the seconds from the start of the first recorded step to the end of each."""
    if not len(columns.steps):
        return None
    times, first = columns.times, columns[TIME_STEP][0]
    start = times[0] - (first if math.isfinite(first) else 0.0)
    return np.append(columns.steps[0] - 1, columns.steps), np.append(0.0, times - start)


def _accuracy_chart(evaluations: Sequence[Evaluation], seconds: Any) -> Chart:
    drawn = []
    for name in dict.fromkeys(row.result.benchmark for row in evaluations):
        rows = {row.step: row.accuracy for row in evaluations if row.result.benchmark == name}
        points = [(step, 100 * accuracy.mean) for step, accuracy in rows.items()]
        intervals = [(100 * accuracy.low, 100 * accuracy.high) for accuracy in rows.values()]
        drawn.append(Series(name, points, intervals))
    return Chart("Accuracy, % with 95% interval", drawn, seconds=seconds)
