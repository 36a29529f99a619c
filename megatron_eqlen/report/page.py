"""One self-contained HTML page a run, made from the run folder's files alone.

recipe.yaml, metrics.jsonl, evaluation/*.json, streams/ ──► report.html
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import jinja2

from megatron_eqlen.evaluation.result import EvaluationResult, compare, read_results
from megatron_eqlen.evaluation.statistics import Interval
from megatron_eqlen.recipe import Recipe, dump, load
from megatron_eqlen.report.chart import Series, line_chart
from megatron_eqlen.report.metrics import read_metrics
from megatron_eqlen.report.streams import Decode, RolloutView, read_step, text_decoder, view

CHARTS = (
    ("Reward", {"objective/reward_mean": "mean reward"}),
    (
        "Response length, tokens",
        {"harvest/ended_response_length": "responses", "harvest/segment_length": "segments"},
    ),
    ("Entropy, nats", {"loss/entropy": "entropy"}),
    ("KL to the reference", {"loss/ref_kl": "KL"}),
    ("Mismatch KL, trainer and engine", {"loss/mismatch_kl": "mismatch KL"}),
    ("Pairs a stream", {"harvest/pairs_per_stream": "pairs"}),
    ("Skipped pairs", {"objective/skip_rate": "share"}),
    ("Gradient norm", {"train/grad_norm": "norm"}),
    ("Tokens a second", {"harvest/tokens_per_second": "rollout", "train/tokens_per_second": "training"}),
    ("Tokens trained", {"packing/unique_tokens": "token trees", "packing/expanded_tokens": "expanded"}),
)
"""Title, and the metrics drawn in it with their names in the legend."""

STREAMS_SHOWN = 4
"""Of the first and of the last recorded step."""

Records = list[dict[str, Any]]


@dataclass(frozen=True)
class Evaluation:
    """One row of the table of evaluations."""

    label: str
    step: int
    result: EvaluationResult
    accuracy: Interval
    gain: Interval | None
    """Against ``before``, paired by problem."""


def write_page(run_folder: Path) -> Path:
    """Write ``report.html`` into a run folder and return its path.

    Raises ValueError if the folder holds no run.
    """
    if not (run_folder / "recipe.yaml").is_file():
        raise ValueError(f"{run_folder}: expected a run folder with a recipe.yaml, found none")
    recipe = load(run_folder / "recipe.yaml")
    records = read_metrics(run_folder / "metrics.jsonl")
    evaluations = read_evaluations(run_folder / "evaluation", records)
    note, steps = read_streams(run_folder / "streams", recipe)
    page = _template().render(
        recipe=recipe,
        recipe_text=dump(recipe),
        records=records,
        evaluations=evaluations,
        headlines=headlines(records, evaluations),
        charts=[_accuracy_chart(evaluations), *(_chart(records, *chart) for chart in CHARTS)],
        stages=stage_seconds(records),
        streams_note=note,
        stream_steps=steps,
    )
    path = run_folder / "report.html"
    path.write_text(page, encoding="utf-8")
    return path


def read_evaluations(folder: Path, records: Records) -> list[Evaluation]:
    """All evaluations in the order of their steps, ``before`` first and ``after`` last."""
    last = records[-1]["step"] if records else 0
    steps = {path: _step_of(path.stem, last) for path in folder.glob("*.json")}
    paths = sorted(steps, key=lambda path: (steps[path], path.stem == "after"))
    first: dict[str, EvaluationResult] = {}
    rows = []
    for path in paths:
        for result in read_results(path):
            before = first.setdefault(result.benchmark, result)
            gain = compare(before, result) if before is not result else None
            rows.append(Evaluation(path.stem, steps[path], result, result.accuracy, gain))
    return rows


def _step_of(label: str, last: int) -> int:
    if label == "before":
        return 0
    return int(label.removeprefix("step-")) if label.startswith("step-") else last


def read_streams(folder: Path, recipe: Recipe) -> tuple[str, list[tuple[str, list[RolloutView]]]]:
    """A note (empty if all is well), and some rollouts of the first and last recorded step."""
    steps = sorted(folder.glob("step-*"))
    note, decode = _decoder(recipe)
    shown = [(step.name, _views(step, decode, recipe)) for step in dict.fromkeys([*steps[:1], *steps[-1:]])]
    return note if steps else "This run recorded no rollouts.", shown


def _decoder(recipe: Recipe) -> tuple[str, Decode]:
    try:
        return "", text_decoder(Path(recipe.model.path))
    except ValueError as error:
        return f"Token ids instead of text: {error}", lambda token_ids: " ".join(map(str, token_ids))


def _views(step: Path, decode: Decode, recipe: Recipe) -> list[RolloutView]:
    by_prompt = {rollout.prompt_id: rollout for rollout in reversed(read_step(step))}
    chosen = [by_prompt[prompt_id] for prompt_id in sorted(by_prompt)[:STREAMS_SHOWN]]
    return [view(rollout, decode, recipe.equal_length) for rollout in chosen]


def headlines(records: Records, evaluations: list[Evaluation]) -> list[tuple[str, str, str]]:
    """(name, value, remark) of the boxes at the top of the page."""
    boxes = []
    for last in [row for row in evaluations if row.label == "after"]:
        first = next(row for row in evaluations if row.result.benchmark == last.result.benchmark)
        name = f"{last.result.benchmark}, avg@{last.result.samples}"
        change = f"{100 * first.accuracy.mean:.1f}% → {100 * last.accuracy.mean:.1f}%"
        boxes.append((name, change, f"gain {last.gain} points" if last.gain else ""))
    for key, name, scale in (
        ("time/step", "seconds a step", "{:.1f}"),
        ("harvest/tokens_per_second", "rollout tokens a second", "{:,.0f}"),
        ("train/tokens_per_second", "training tokens a second", "{:,.0f}"),
    ):
        if values := _values(records, key):
            boxes.append((name, scale.format(fmean(y for _, y in values)), "mean over steps"))
    return boxes


def stage_seconds(records: Records) -> list[tuple[str, float]]:
    """(stage, mean seconds a step), longest first."""
    names = {name for record in records for name in record if name.startswith("time/")} - {"time/step"}
    means = {name: sum(y for _, y in _values(records, name)) / len(records) for name in sorted(names)}
    return [(name.removeprefix("time/"), means[name]) for name in sorted(means, key=means.get, reverse=True)]


def _chart(records: Records, title: str, metrics: dict[str, str]) -> str:
    return line_chart(title, [Series(name, _values(records, key)) for key, name in metrics.items()])


def _accuracy_chart(evaluations: list[Evaluation]) -> str:
    series = []
    for name in dict.fromkeys(row.result.benchmark for row in evaluations):
        rows = [row for row in evaluations if row.result.benchmark == name]
        points = [(row.step, 100 * row.accuracy.mean) for row in rows]
        bars = [(100 * row.accuracy.low, 100 * row.accuracy.high) for row in rows]
        series.append(Series(name, points, bars))
    return line_chart("Accuracy, % with 95% interval", series)


def _values(records: Records, key: str) -> list[tuple[float, float]]:
    return [(record["step"], record[key]) for record in records if record.get(key) is not None]


def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("megatron_eqlen.report", "."),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html")
