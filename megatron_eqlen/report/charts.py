"""Charts over a run's steps: their titles, series and numbers. ``page.js`` draws them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_eqlen import metrics as m
from megatron_eqlen.evaluation.result import Evaluation, histories
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
from megatron_eqlen.sampling.profile import Profile

COLOURS = (
    "#3f7ad6", "#d9822b", "#379a72", "#a65bbd", "#c95567", "#8a8f98", "#4aa3b5", "#9a7350", "#9cab2a",
    "#e07fb4",
)  # fmt: skip
"""Colours of series and stages, distinct on light and on dark backgrounds."""
MAX_POINTS = 1000
"""Most points of a series; longer ones are averaged in equal groups of neighbours."""
SMOOTH_FROM = 100
"""Number of points from which a line is drawn faintly, below its moving average."""

PERCENT = ", % of "
"""Part of a series' name: its metric is a share of the quantity named after it, and is drawn in percent."""
CHARTS: dict[str, dict[str, tuple[str, ...]]] = {
    "Reward": {"mean": REWARD},
    "Loss of the data's responses, nats": {"token": ("loss/nll",)},
    "Pairs per stream": {"pairs": PAIRS},
    "Length, tokens": {
        "responses": RESPONSE_LENGTH,
        "left out without a reward": ("reward/dropped_length",),
        "segments": ("harvest/segment_length", "objective/segment_length_mean"),
    },
    "Shares, %": {
        "equal rewards, % of pairs": ("objective/skip_rate",),
        "without advantage, % of comparison units": ("objective/zero_advantage_fraction",),
        "truncated, % of streams or completions": ("harvest/truncated_fraction",),
    },
    "Entropy, nats": {"entropy": ("loss/entropy",)},
    "KL to the teacher, nats": {"KL": ("loss/teacher_kl",)},
    "KL to the reference, nats": {"KL": ("loss/ref_kl",)},
    "Mismatch KL, engine to trainer, nats": {"KL": MISMATCH},
    "Staleness of tokens, updates": {"mean": ("staleness/mean",), "largest": ("staleness/max",)},
    "Gradient norm": {"norm": ("train/grad_norm",)},
    "Clipped tokens, %": {
        "low, % of tokens": ("loss/clip_fraction_low",),
        "high, % of tokens": ("loss/clip_fraction_high",),
    },
    "Tokens per second": {"rollout": ROLLOUT_SPEED, "training": TRAINING_SPEED},
    "Tokens trained": {
        "in token trees": ("packing/unique_tokens",),
        "if every side had its own prefix": ("packing/expanded_tokens",),
    },
}
"""Each chart's title, with its series and the names of their metrics. Series without a value are left out."""
RARE = {"KL to the reference, nats", "Staleness of tokens, updates", "Clipped tokens, %", "Tokens trained"}
"""Charts that a page shows on demand."""
METRICS = {
    "time/step",
    *(f"time/{stage}" for stage in m.STAGES),
    *(name for lines in CHARTS.values() for names in lines.values() for name in names),
}
"""All metrics that a page draws."""


@dataclass(frozen=True)
class Series:
    name: str
    y: np.ndarray
    """[n] values at the chart's ``x``; NaN for none."""
    band: np.ndarray | None = None
    """[2, n] lower and upper ends of the values' intervals."""
    colour: str = COLOURS[0]
    last: str = ""
    """Text beside the name in the legend."""


@dataclass(frozen=True)
class Chart:
    title: str
    x: np.ndarray
    """[n] steps, rising."""
    series: Sequence[Series]
    clock: Sequence[str] = ()
    """[n] times since the run's start, as text; empty if they are not known."""
    stacked: bool = False
    """The series are parts of a whole."""
    starts: Sequence[float] = ()
    """Left ends of bars that end at ``x``, in percent of a response."""

    def data(self) -> dict[str, Any]:
        """Return what ``page.js`` draws, as plain data: of each series the columns ``y`` and, where there are
        some, ``low``, ``high`` and ``smooth``, the moving average; ``hover``, a height between the series."""
        # [series, n]; the pointer is caught by an invisible line at the mean height of the series
        values = np.array([series.y for series in self.series]).reshape(-1, len(self.x))
        counts = np.isfinite(values).sum(axis=0)
        series = []
        for one in self.series:
            columns = {"y": one.y}
            if one.band is not None:
                columns |= {"low": one.band[0], "high": one.band[1]}
            elif np.isfinite(one.y).sum() >= SMOOTH_FROM and not self.stacked:
                columns["smooth"] = smoothed(one.y)
            plain = {name: _plain(column) for name, column in columns.items()}
            series.append({"name": one.name, "colour": one.colour, "columns": plain})
        return {
            "x": _plain(self.x),
            "clock": list(self.clock),
            "hover": _plain(np.nansum(values, axis=0) / np.maximum(counts, 1)),
            "series": series,
            "stacked": self.stacked,
            "starts": [*self.starts],
        }


def _plain(values: np.ndarray) -> list[float | None]:
    """Return numbers of six digits, None for those that are not finite."""
    return [float(f"{value:.6g}") if math.isfinite(value) else None for value in values.tolist()]


def smoothed(values: np.ndarray) -> np.ndarray:
    """Return the mean of each value with its neighbours, a fortieth of all to each side."""
    reach = max(len(values) // 40, 1)
    kernel, known = np.ones(2 * reach + 1), np.isfinite(values)
    sums = np.convolve(np.where(known, values, 0.0), kernel)[reach:-reach]
    # neighbours without a value, and those beyond the ends, do not count
    counts = np.convolve(known.astype(float), kernel)[reach:-reach]
    return np.where(known, sums / np.maximum(counts, 1.0), np.nan)


def averaged(values: np.ndarray) -> np.ndarray:
    """Return at most ``MAX_POINTS`` means of the finite values of equal groups of neighbours (NaN: none)."""
    size = max(math.ceil(len(values) / MAX_POINTS), 1)
    groups = np.pad(values.astype(float), (0, -len(values) % size), constant_values=np.nan).reshape(-1, size)
    known = np.isfinite(groups)
    counts = known.sum(axis=1)
    sums = np.where(known, groups, 0.0).sum(axis=1)
    return np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)


# ---- what a run measured --------------------------------------------------------------------------------


def charts(columns: Columns, evaluations: Sequence[Evaluation]) -> list[Chart]:
    """Return the charts: accuracies with their intervals, those of ``CHARTS``, and the seconds by stage."""
    drawn = [_accuracies(columns, evaluations)] if evaluations else []
    # steps are grouped as the values are, so each point has the mean step of its group
    x = averaged(columns.steps)
    clock = _clock(columns, x)
    for title, lines in CHARTS.items():
        series = [
            Series(name, averaged(values), colour=COLOURS[n], last=compact(_known(values)[-1]))
            # a series keeps its colour where others are left out
            for n, (name, metric) in enumerate(lines.items())
            if len(_known(values := columns.first_of(metric) * (100 if PERCENT in name else 1)))
        ]
        if series:
            drawn.append(Chart(title, x, series, clock))
    if stages := _stages(columns):
        drawn.append(Chart("Seconds per step by stage", x, stages, clock, stacked=True))
    return drawn


def profile_chart(profile: Profile) -> Chart:
    ends, (decided, *band) = 100 * profile.ends, 100 * profile.decided
    last = f"{decided[-1]:.0f}% in the last {100 - ([0.0, *ends])[-2]:.0f}% of the tokens"
    series = [Series("decided in this part", decided, np.array(band), last=last)]
    title = "Share of the reward's variance that each part of a response decides, % with 95% interval"
    return Chart(title, ends, series, starts=[0.0, *ends[:-1].tolist()])


def _known(values: np.ndarray) -> np.ndarray:
    return values[np.isfinite(values)]


def _stages(columns: Columns) -> list[Series]:
    """Return the seconds of every stage of every step, the longest first; empty without records."""
    taken = {stage: np.nan_to_num(columns[f"time/{stage}"]) for stage in m.STAGES}
    totals = {stage: float(seconds.sum()) for stage, seconds in taken.items() if seconds.any()}
    overall = sum(totals.values())
    last = {s: f"{compact(t / len(columns.steps))} s, {t / overall:.0%}" for s, t in totals.items()}
    colours: dict[str, str] = dict(zip(m.STAGES, COLOURS, strict=True))
    return [
        Series(stage, averaged(taken[stage]), colour=colours[stage], last=last[stage])
        for stage in sorted(totals, key=lambda stage: -totals[stage])
    ]


def _accuracies(columns: Columns, evaluations: Sequence[Evaluation]) -> Chart:
    x = sorted({row.step for row in evaluations})
    series = []
    for n, (name, rows) in enumerate(histories(evaluations).items()):
        at = {row.step: row.result.accuracy for row in rows}
        values = [(at[s].mean, at[s].low, at[s].high) if s in at else (math.nan,) * 3 for s in x]
        mean, *band = 100 * np.array(values).T
        colour = COLOURS[n % len(COLOURS)]
        series.append(Series(name, mean, np.array(band), colour, compact(float(_known(mean)[-1]))))
    return Chart("Accuracy, % with 95% interval", np.array(x), series, _clock(columns, np.array(x)))


def _clock(columns: Columns, x: np.ndarray) -> list[str]:
    """Return the times from the start of the first recorded step to the ends of the steps ``x``, as text."""
    if not len(columns.steps):
        return []
    steps = np.append(columns.steps[0] - 1, columns.steps)
    # only ends of steps are recorded: the first one began its own duration before its end
    first = np.nan_to_num(columns["time/step"][0])
    ends = np.append(0.0, columns.times - columns.times[0] + first)
    return [duration(seconds) for seconds in np.interp(x, steps, ends)]


def facts(columns: Columns) -> list[tuple[str, str, str]]:
    """Return (name, value, remark) of the boxes below the headline."""
    boxes = []
    if len(reward := _known(columns.first_of(REWARD))):
        share = max(len(reward) // 5, 1)
        ends = f"{compact(float(reward[:share].mean()))} → {compact(float(reward[-share:].mean()))}"
        boxes.append(("reward", ends, f"mean of {share} steps at each end"))
    for name, metric in (("rollout", ROLLOUT_SPEED), ("training", TRAINING_SPEED)):
        if len(values := _known(columns.first_of(metric))):
            boxes.append((name, f"{compact(float(values.mean()))} tokens/s", "mean over steps"))
    if len(seconds := _known(columns["time/step"])):
        newest = seconds[-STEPS_FOR_ETA:]
        remark = f"mean of the newest {len(newest)}; {duration(float(seconds.sum()))} in all steps"
        boxes.append(("time per step", f"{compact(float(newest.mean()))} s", remark))
    return boxes
