"""What a run measured, as charts and boxes of a page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from megatron_eqlen.budget import Budget
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
from megatron_eqlen.report.chart import Chart, Point, Series, line_chart, stacked_bars
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
from megatron_eqlen.report.timeline import timeline

Names = tuple[str, ...]

CHARTS: dict[str, dict[str, Names]] = {
    "Reward": {"mean": REWARD},
    "Pairs per stream": {"pairs": PAIRS},
    "Length, tokens": {
        "responses": RESPONSE_LENGTH,
        "segments": (HARVEST_SEGMENT_LENGTH, OBJECTIVE_SEGMENT_LENGTH_MEAN),
    },
    "Shares": {
        "skipped pairs": (OBJECTIVE_SKIP_RATE,),
        "no advantage": (OBJECTIVE_ZERO_ADVANTAGE_FRACTION,),
        "truncated": (HARVEST_TRUNCATED_FRACTION,),
    },
    "Entropy, nats": {"entropy": (LOSS_ENTROPY,)},
    "KL to the reference model": {"KL": (LOSS_REF_KL,)},
    "Mismatch KL, engine to trainer": {"KL": MISMATCH},
    "Staleness of trained tokens, updates": {"mean": (STALENESS_MEAN,), "largest": (STALENESS_MAX,)},
    "Gradient norm": {"norm": (TRAIN_GRAD_NORM,)},
    "Clipped tokens, share": {
        "low": (LOSS_CLIP_FRACTION_LOW,),
        "high": (LOSS_CLIP_FRACTION_HIGH,),
    },
    "Tokens per second": {"rollout": ROLLOUT_SPEED, "training": TRAINING_SPEED},
    "Tokens trained": {
        "in token trees": (PACKING_UNIQUE_TOKENS,),
        "if every side had its own prefix": (PACKING_EXPANDED_TOKENS,),
    },
}
"""Each chart's title, with its series and the names of their metrics; what a run did not measure is left
out."""


def facts(records: Records, budget: Budget) -> list[tuple[str, str, str]]:
    """(name, value, remark) of the boxes below the headline."""
    boxes = []
    if reward := series(records, REWARD):
        share = max(len(reward) // 5, 1)
        first, last = (fmean(y for _, y in part) for part in (reward[:share], reward[-share:]))
        boxes.append(("reward", f"{compact(first)} → {compact(last)}", f"mean of {share} steps at each end"))
    for name, metric in (("rollout", ROLLOUT_SPEED), ("training", TRAINING_SPEED)):
        if values := series(records, metric):
            boxes.append((name, f"{compact(fmean(y for _, y in values))} tokens/s", "mean over steps"))
    if seconds := series(records, (TIME_STEP,)):
        total = sum(y for _, y in seconds)
        boxes.append(("step", f"{compact(total / len(seconds))} s", f"{duration(total)} in all steps"))
    if records:
        outcome = budget.outcome(spent(records[-1]["step"], records[-1]))
        boxes.append(("length", outcome, budget.describe()))
    return boxes


def charts(records: Records, evaluations: Sequence[Evaluation]) -> list[Chart]:
    drawn = [_accuracy_chart(evaluations)] if evaluations else []
    for title, lines in CHARTS.items():
        parts = [Series(name, series(records, metric)) for name, metric in lines.items()]
        parts = [part for part in parts if part.points]
        if parts:
            drawn.append(Chart(title, _legend(parts), line_chart(title, parts)))
    return drawn


def stages(records: Records) -> Chart | None:
    """Seconds of every stage of every step, the longest at the bottom; None without records."""
    rows = [_stage_seconds(record) for record in records]
    totals = sum((Counter(row) for row in rows), Counter())
    if not totals:
        return None
    steps = [record["step"] for record in records]
    parts = [
        Series(name, [(step, row.get(name, 0.0)) for step, row in zip(steps, rows, strict=True)])
        for name, _ in totals.most_common()
    ]
    whole = totals.total()
    legend = [
        (name, f"{compact(seconds / len(rows))} s, {seconds / whole:.0%}")
        for name, seconds in totals.most_common()
    ]
    title = "Seconds per step by stage"
    return Chart(title, legend, stacked_bars(title, parts))


def last_steps(records: Records) -> Chart | None:
    """Who worked when; None where no step says so."""
    title = "The last steps, seconds"
    legend, picture = timeline(title, records)
    return Chart(title, legend, picture) if picture else None


def series(records: Records, names: Names) -> list[Point]:
    """(step, value) of the first of ``names`` that the run measured, where it is a number."""
    name = next((name for name in names if any(name in record for record in records)), "")
    return [(record["step"], record[name]) for record in records if record.get(name) is not None]


def _stage_seconds(record: dict[str, Any]) -> dict[str, float]:
    """Stage to seconds, of those that the step had."""
    return {stage: record[f"time/{stage}"] for stage in STAGES if record.get(f"time/{stage}") is not None}


def _accuracy_chart(evaluations: Sequence[Evaluation]) -> Chart:
    parts = []
    for name in dict.fromkeys(row.result.benchmark for row in evaluations):
        rows = [row for row in evaluations if row.result.benchmark == name]
        points = [(row.step, 100 * row.accuracy.mean) for row in rows]
        intervals = [(100 * row.accuracy.low, 100 * row.accuracy.high) for row in rows]
        parts.append(Series(name, points, intervals))
    title = "Accuracy, % with 95% interval"
    return Chart(title, _legend(parts), line_chart(title, parts))


def _legend(parts: list[Series]) -> list[tuple[str, str]]:
    return [(part.name, compact(part.points[-1][1])) for part in parts]
