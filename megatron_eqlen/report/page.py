"""A run's page: one self-contained HTML file, made from the run folder's files alone.

recipe.yaml, metrics.jsonl, evaluation/*.json, streams/ ──► report.html
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from megatron_eqlen.budget import Budget
from megatron_eqlen.evaluation.result import EvaluationResult, compare
from megatron_eqlen.evaluation.statistics import Interval
from megatron_eqlen.files import write_text
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
from megatron_eqlen.recipe import Recipe
from megatron_eqlen.recipe_load import dump, load_run
from megatron_eqlen.report.chart import Chart, Point, Series, line_chart, stacked_bars
from megatron_eqlen.report.drawing import draw
from megatron_eqlen.report.evaluations import evaluations
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
from megatron_eqlen.report.metrics import Records, read_metrics
from megatron_eqlen.report.rollouts import Decode, RolloutView, Training, view
from megatron_eqlen.report.template import template
from megatron_eqlen.report.timeline import timeline
from megatron_eqlen.rollout.recorder import fill_token_ids, read_skeletons, step_files
from megatron_eqlen.tokenizer import load_tokenizer
from megatron_eqlen.types import Rollout

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

ROLLOUTS_SHOWN = 4
MOST_TEXT = 1500
"""Characters of a segment on the page."""


@dataclass(frozen=True)
class Evaluation:
    """One row of the table of evaluations."""

    label: str
    step: int
    result: EvaluationResult
    accuracy: Interval
    gain: Interval | None
    """The change since the run's first evaluation of the benchmark, paired by problem; None if there is
    none."""


@dataclass(frozen=True)
class StepView:
    step: int
    """Counted from 1."""
    folder: str
    rollouts: list[RolloutView]


def write_page(run_folder: Path) -> Path:
    """Write ``report.html`` into a run folder and return its path.

    Metrics, evaluations and streams may be missing. Raises ValueError if the folder holds no recipe, or
    naming the file that cannot be read.
    """
    recipe = load_run(run_folder)
    records = read_metrics(run_folder)
    done = records[-1]["step"] if records else 0
    evaluated = read_evaluations(run_folder / "evaluation", done)
    decode, note = find_decoder(Path(recipe.model.path))
    page = template("page.html.jinja", shorten=shorten, percent=percent, points=points).render(
        recipe=recipe,
        recipe_text=dump(recipe),
        records=records,
        evaluations=evaluated,
        outcomes=outcomes(evaluated),
        facts=facts(records, recipe.budget),
        charts=charts(records, evaluated),
        stages=[chart for chart in (stages(records), last_steps(records)) if chart is not None],
        steps=read_steps(run_folder / "streams", recipe, decode),
        decoder_note=note,
        draw=draw,
    )
    path = run_folder / "report.html"
    write_text(path, page)
    return path


# ---- evaluations --------------------------------------------------------------------------------------


def read_evaluations(folder: Path, steps: int) -> list[Evaluation]:
    """All evaluations of a run that has taken ``steps`` steps, by their steps."""
    first: dict[str, EvaluationResult] = {}
    rows = []
    for label, step, results in evaluations(folder, steps):
        for result in results:
            gain = _gain(first.setdefault(result.benchmark, result), result)
            rows.append(Evaluation(label, step, result, result.accuracy, gain))
    return rows


def _gain(first: EvaluationResult, result: EvaluationResult) -> Interval | None:
    same_questions = first.manifest["question_ids"] == result.manifest["question_ids"]
    return compare(first, result) if first is not result and same_questions else None


def outcomes(evaluations: list[Evaluation]) -> list[list[Evaluation]]:
    """Of each benchmark the first and the last evaluation, or the only one."""
    by_benchmark: dict[str, list[Evaluation]] = {}
    for row in evaluations:
        by_benchmark.setdefault(row.result.benchmark, []).append(row)
    return [[*rows[:1], *rows[1:][-1:]] for rows in by_benchmark.values()]


# ---- metrics ------------------------------------------------------------------------------------------


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


def charts(records: Records, evaluations: list[Evaluation]) -> list[Chart]:
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


def _accuracy_chart(evaluations: list[Evaluation]) -> Chart:
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


# ---- rollouts -----------------------------------------------------------------------------------------


def find_decoder(model: Path) -> tuple[Decode, str]:
    """The function from token ids to text, and a note if the model's tokenizer cannot be found."""
    try:
        return load_tokenizer(model).decode, ""
    except ValueError as error:
        return lambda token_ids: " ".join(map(str, token_ids)), f"Token ids instead of text: {error}"


def read_steps(folder: Path, recipe: Recipe, decode: Decode) -> list[StepView]:
    """A few rollouts of the first and of the last recorded step."""
    steps = sorted(folder.glob("step-[0-9]*"))
    ends = [next(filter(step_files, order), None) for order in (steps, reversed(steps))]
    return [_read_step(step, recipe, decode) for step in dict.fromkeys(ends) if step is not None]


def _read_step(folder: Path, recipe: Recipe, decode: Decode) -> StepView:
    files = step_files(folder)
    rollouts = read_skeletons(files)
    training = Training(rollouts, recipe)
    shown = _choose(rollouts, training)
    fill_token_ids(shown, files)
    views = [view(rollout, decode, training) for rollout in shown]
    return StepView(int(folder.name.removeprefix("step-")) + 1, folder.name, views)


def _choose(rollouts: list[Rollout], training: Training) -> list[Rollout]:
    """Rollouts of different prompts, first those with unequal rewards."""
    ordered = sorted(rollouts, key=lambda one: not _teaches(one, training))
    by_prompt: dict[str, Rollout] = {}
    for rollout in ordered:
        by_prompt.setdefault(rollout.prompt_id, rollout)
    return list(by_prompt.values())[:ROLLOUTS_SHOWN]


def _teaches(rollout: Rollout, training: Training) -> bool:
    return any(training.of(segment)[1] in ("raised", "lowered") for segment in rollout.segments())


# ---- the page -----------------------------------------------------------------------------------------


def shorten(text: str) -> str:
    """``text``, or its beginning and end where it is too long for the page."""
    if len(text) <= MOST_TEXT:
        return text
    half = MOST_TEXT // 2
    return f"{text[:half]} […{len(text) - 2 * half} characters…] {text[-half:]}"


def percent(share: float) -> str:
    return f"{100 * share:.1f}%"


def points(interval: Interval) -> str:
    """A difference of accuracies: ``+18.2 [+12.0, +24.5] points``."""
    mean, low, high = (f"{100 * value:+.1f}" for value in (interval.mean, interval.low, interval.high))
    return f"{mean} [{low}, {high}] points"
