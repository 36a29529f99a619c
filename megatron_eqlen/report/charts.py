"""Charts over steps: a run's metrics, in the form that ``page.js`` draws."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

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
from megatron_eqlen.report.metrics import Records
from megatron_eqlen.report.progress import STEPS_FOR_ETA

MAX_POINTS = 1000
"""Most points of a series; longer ones are averaged in equal groups of neighbours: no chart has more
pixels."""

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
    seconds: Mapping[Any, float] = field(default_factory=dict)
    """Seconds since the run's start at each x; empty if x is not a step of one run."""
    stacked: bool = False
    """The series are parts of a whole and have the same x."""

    def data(self) -> dict[str, Any]:
        """Data for ``page.js``: every series over the union of all x, rounded to six digits."""
        drawn = [_averaged(series) for series in self.series]
        places = sorted({x for series in drawn for x, _ in series.points})
        return {
            "title": self.title,
            "xName": self.x_name,
            "stacked": self.stacked,
            "x": [_rounded(x) for x in places],
            "seconds": [_rounded(_at(self.seconds, x)) for x in places] if self.seconds else None,
            "series": [
                {"name": series.name, "colour": series.colour, **_columns(series, places)} for series in drawn
            ],
        }  # fmt: skip


def _columns(series: Series, places: Sequence[float]) -> dict[str, list[float | None]]:
    """Return ``y`` at each of ``places``, with ``low`` and ``high`` if the series has intervals."""
    xs = [x for x, _ in series.points]
    rows = {"y": [y for _, y in series.points]}
    if series.intervals:
        rows |= {"low": [low for low, _ in series.intervals], "high": [high for _, high in series.intervals]}
    found = {name: dict(zip(xs, values, strict=True)) for name, values in rows.items()}
    return {name: [_rounded(values.get(x)) for x in places] for name, values in found.items()}


def _rounded(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(f"{value:.6g}")


def _at(values: Mapping[Any, float], x: float) -> float:
    """Return the value at ``x``, or at the largest key below it: averaged points lie between steps."""
    if x in values:
        return values[x]
    return values[max((key for key in values if key < x), default=min(values))]


def _averaged(series: Series) -> Series:
    """Return at most ``MAX_POINTS`` points, each the mean of neighbours."""
    if len(series.points) <= MAX_POINTS or series.intervals:
        return series
    size = math.ceil(len(series.points) / MAX_POINTS)
    groups = [series.points[start : start + size] for start in range(0, len(series.points), size)]
    return Series(series.name, [(fmean(x for x, _ in group), fmean(y for _, y in group)) for group in groups])


# ---- what a run measured --------------------------------------------------------------------------------


def charts(records: Records, evaluations: Sequence[Evaluation]) -> list[Chart]:
    """Return the charts: accuracies with their intervals, then ``CHARTS``."""
    seconds = _seconds(records)
    drawn = [_accuracy_chart(evaluations, seconds)] if evaluations else []
    for title, lines in CHARTS.items():
        found = [Series(name, _points(records, name, metric)) for name, metric in lines.items()]
        if shown := [series for series in found if series.points]:
            drawn.append(Chart(title, shown, seconds=seconds))
    return drawn


def stages(records: Records) -> Chart | None:
    """Return the seconds of every stage of every step, the longest at the bottom; None without records."""
    rows = [_stage_seconds(record) for record in records]
    totals = sum((Counter(row) for row in rows), Counter())
    if not totals:
        return None
    overall = totals.total()
    series = [
        Series(
            name,
            [(record["step"], row.get(name, 0.0)) for record, row in zip(records, rows, strict=True)],
            colour=COLOURED.index(name),
            remark=f"{compact(total / len(rows))} s, {total / overall:.0%}",
        )
        for name, total in totals.most_common()
    ]
    return Chart("Seconds per step by stage", series, seconds=_seconds(records), stacked=True)


def facts(records: Records, budget: Budget) -> list[tuple[str, str, str]]:
    """Return (name, value, remark) of the boxes below the headline."""
    boxes = []
    if reward := measured(records, REWARD):
        share = max(len(reward) // 5, 1)
        first, last = (fmean(y for _, y in part) for part in (reward[:share], reward[-share:]))
        boxes.append(("reward", f"{compact(first)} → {compact(last)}", f"mean of {share} steps at each end"))
    for name, metric in (("rollout", ROLLOUT_SPEED), ("training", TRAINING_SPEED)):
        if values := measured(records, metric):
            boxes.append((name, f"{compact(fmean(y for _, y in values))} tokens/s", "mean over steps"))
    if seconds := measured(records, (TIME_STEP,)):
        newest = [y for _, y in seconds[-STEPS_FOR_ETA:]]
        remark = f"mean of the newest {len(newest)}; {duration(sum(y for _, y in seconds))} in all steps"
        boxes.append(("time per step", f"{compact(fmean(newest))} s", remark))
    if records:
        outcome = budget.outcome(spent(records[-1]["step"], records[-1]))
        boxes.append(("progress", outcome, f"limit: {budget.describe()}"))
    return boxes


def measured(records: Records, names: Names) -> list[Point]:
    """Return (step, value) of the first of ``names`` that the run recorded, where it is a number."""
    name = next((name for name in names if any(name in record for record in records)), "")
    return [(record["step"], record[name]) for record in records if record.get(name) is not None]


def _points(records: Records, name: str, metric: Names) -> list[Point]:
    scale = 100 if PERCENT in name else 1
    return [(step, scale * value) for step, value in measured(records, metric)]


def _seconds(records: Records) -> dict[float, float]:
    """Return for each step the seconds from the start of the first recorded step to its end."""
    if not records:
        return {}
    start = records[0]["time"] - (records[0].get(TIME_STEP) or 0.0)
    return {records[0]["step"] - 1: 0.0} | {record["step"]: record["time"] - start for record in records}


def _stage_seconds(record: dict[str, Any]) -> dict[str, float]:
    """Return seconds by stage, without the stages that the step did not have."""
    return {stage: record[f"time/{stage}"] for stage in STAGES if record.get(f"time/{stage}") is not None}


def _accuracy_chart(evaluations: Sequence[Evaluation], seconds: Mapping[float, float]) -> Chart:
    drawn = []
    for name in dict.fromkeys(row.result.benchmark for row in evaluations):
        rows = {row.step: row.accuracy for row in evaluations if row.result.benchmark == name}
        points = [(step, 100 * accuracy.mean) for step, accuracy in rows.items()]
        intervals = [(100 * accuracy.low, 100 * accuracy.high) for accuracy in rows.values()]
        drawn.append(Series(name, points, intervals))
    return Chart("Accuracy, % with 95% interval", drawn, seconds=seconds)
