"""The page: right numbers, one well-formed file with everything in it, whatever the run folder lacks."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tests.kit.rollouts as kit
from megatron_eqlen.cli.__main__ import main
from megatron_eqlen.evaluation.result import (
    Answers,
    EvaluationResult,
    evaluation_files,
    read_evaluations,
    write_results,
)
from megatron_eqlen.report.charts import MAX_POINTS, METRICS, Chart, averaged, charts, facts, smoothed
from megatron_eqlen.report.metrics import Columns, MetricsWriter
from megatron_eqlen.report.page import PageWriter, write_page
from megatron_eqlen.report.recorded import recorded_advice
from megatron_eqlen.sampling.equal_length.dual_track import pairs_of
from megatron_eqlen.tokens import Tokens
from megatron_eqlen.types import Grade, Part, Rollout
from tests.kit import ROOT
from tests.kit.recipes import SAMPLED
from tests.kit.report_runs import (
    RIGHT,
    WRONG,
    example_stream,
    make_tokenizer,
    prompt,
    recipe,
    unpacked,
    write_run,
)

VOID = {"meta", "br", "link", "input"}
"""Elements of the page that have no end tag; SVG's shapes close themselves."""


class Page(HTMLParser):
    """Checks that tags close in order; collects text and references."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.open: list[str] = []
        self.references: list[str] = []
        self.words: list[str] = []
        self.html = path.read_text(encoding="utf-8")
        self.feed(self.html)
        assert self.open == []
        self.text = " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag, attributes):
        self.references += [value for name, value in attributes if name in ("src", "href")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        assert tag in ("line", "rect", "path", "polyline")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if not {"style", "script"} & {*self.open}:
            self.words.append(data)


def drawn_rollouts(page: Page) -> list[dict[str, Any]]:
    return json.loads(re.search("const ROWS = (.*)\n", page.html)[1])


def log_steps(run: Path, steps: int, **extra: float) -> None:
    writer = MetricsWriter(run)
    for step in range(1, steps + 1):
        seconds = {"harvest": 3.0, "train": 1.0, "evaluate": 1.0, "step": 5.0, "gpu_hours": 100.0 * step}
        stages = {f"time/{name}": value for name, value in seconds.items()}
        writer.write(step, {"reward/mean": step / steps, "loss/entropy": 1.0, **stages, **extra})
    writer.close()


def evaluate(run: Path, label: str, rewards: np.ndarray, **sampled: float) -> None:
    """Write an evaluation of ``rewards`` [P, k]."""
    verdicts = np.where(rewards, "correct", "wrong").tolist()
    rows = enumerate(zip(rewards.astype(float).tolist(), verdicts, strict=True))
    answers = [Answers(f"p{n}", row, said, [10] * len(row)) for n, (row, said) in rows]
    manifest = {"question_ids": [answer.prompt_id for answer in answers], "rollout": SAMPLED | sampled}
    write_results(run / "evaluation" / f"{label}.json", [EvaluationResult("sums", answers, manifest)])


def test_a_run_that_has_only_begun_has_a_page(tmp_path):
    page = Page(write_page(write_run(tmp_path, recipe(tmp_path))))
    assert "0 of 20 steps" in page.text
    assert "No step has been taken yet" in page.text
    assert "No step's rollouts are recorded" in page.text
    assert "<script" not in page.html, "no chart, no script"


def test_a_page_loads_nothing(tmp_path):
    """Its policy forbids what the text of a rollout or the library of plots might ask for."""
    run = write_run(tmp_path, recipe(tmp_path))
    log_steps(run, 3)
    path = write_page(run)
    page = Page(path)
    assert page.references == ["data:,"]
    assert not re.search(r"https?:|url\(|@import", page.html.partition("<script")[0])
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', page.html)
    assert policy.startswith("default-src 'none'; ")
    assert not re.search(r"https?:|\*|'self'|connect-src", policy)
    assert path.stat().st_size < 5_000_000


def test_the_headline_is_accuracy_before_and_after_with_its_paired_gain(tmp_path):
    run = write_run(tmp_path, recipe(tmp_path))
    log_steps(run, 4)
    before = np.array([[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 0, 0], [1, 1, 1, 0]])
    evaluate(run, "after", np.maximum(before, [1, 0, 0, 1]))
    evaluate(run, "step-00000002", before)
    evaluate(run, "before", before)
    page = Page(write_page(run))
    assert "37.5% → 68.8%" in page.text
    assert re.search(r"\+31\.2 points \[[+-]\d+\.\d, \+\d+\.\d\]", page.text)
    sampled = r"4 problems × 4; temperature 1, top-p 0.9, at most 4,096 tokens"
    labels = re.findall(rf"{sampled} (before|step 2|after)", page.text)
    assert labels == ["before", "step 2", "after"]
    chart = charts(Columns(run, METRICS), read_evaluations(evaluation_files(run / "evaluation", 4)))[0]
    (accuracy,) = chart.series
    assert (chart.x.tolist(), accuracy.y.tolist()) == ([0, 2, 4], [37.5, 37.5, 68.75])
    assert accuracy.last == "68.8"
    evaluate(run, "after", before, temperature=0.0)
    text = Page(write_page(run)).text
    assert "37.5% · 37.5%" in text, "sampled otherwise: no change that training made"
    assert "→ 37.5%" not in text


@pytest.mark.parametrize("folder", ["streams/step-00000000", "step-00000000"], ids=["run", "harvest"])
@pytest.mark.parametrize("sampling", ["tree", "equal_length"])
def test_forks_of_a_run_or_harvest_say_where_its_outcome_is_decided(tmp_path, folder, sampling, capsys):
    ends = [Part(Tokens.of([9], [-1.0]), "stop", grade) for grade in (WRONG, RIGHT, WRONG)]
    tree = kit.tree(prompt(1), 3, [Part(Tokens.of([5, 6], [-1.0] * 2)), *ends], [-1, -1, 0, 0])
    rollout = tree if sampling == "tree" else example_stream()
    forked = [dataclasses.replace(rollout, prompt=prompt(number)) for number in range(10)]
    objective = "rloo" if sampling == "tree" else "grpo"
    run = write_run(tmp_path, recipe(tmp_path, sampling=sampling, objective=objective))
    (run / folder).mkdir(parents=True)
    kit.record(run / folder / "rank-0.arrow", forked)
    assert main(["report", str(run)]) == 0
    path, sentence = capsys.readouterr().out.splitlines()
    assert path == str(run / "report.html")
    said = r"forks at .* of a response are not seen to pay over the same baseline alone.* \(10 prompts\)"
    assert re.fullmatch(said, sentence), "of one token or two"
    page = Page(run / "report.html")
    assert sentence in page.text
    (chart,) = json.loads(re.search("const CHARTS = (.*)\n", page.html)[1])
    assert chart["starts"][0] == 0
    assert f"% in the last {100 - chart['starts'][-1]:.0f}% of the tokens" in page.text
    assert "Step 1 step-00000000" in page.text
    assert main(["report", str(run), "--step", "1"]) == 0
    assert capsys.readouterr().out == f"{run / 'rollouts-1.html'}\n"
    assert chart["x"][-1] == 100
    assert sum(chart["series"][0]["columns"]["y"]) == pytest.approx(100)


@pytest.mark.parametrize("lost", ["unscored", "suspended"])
def test_advice_is_of_rollouts_that_have_all_their_rewards(tmp_path, lost):
    """Other prompts' rollouts lack one, or go on in the next step."""
    settings = recipe(tmp_path, sampling="tree", objective="rloo")

    def rollouts(count: int, grade: Grade) -> list[Rollout]:
        ends = [Part(Tokens.of([9], [-1.0]), "stop", each) for each in (WRONG, RIGHT, grade)]
        tree = kit.tree(prompt(1), 3, [Part(Tokens.of([5, 6], [-1.0] * 2)), *ends], [-1, -1, 0, 0])
        return [dataclasses.replace(tree, prompt=prompt(number)) for number in range(count)]

    whole = rollouts(10, WRONG)
    others = rollouts(14, Grade.unscored("late") if lost == "unscored" else RIGHT)[10:]
    if lost == "suspended":
        others = [dataclasses.replace(each, outcome="suspended") for each in others]
    told = []
    for name, recorded in (("all", whole), ("more", whole + others)):
        run = write_run(tmp_path / name, settings, {"step-00000000": recorded})
        told.append(recorded_advice(run, settings)[1])
    assert "(10 prompts)" in told[0] == told[1]


def test_only_stages_share_out_a_step(tmp_path):
    run = write_run(tmp_path, recipe(tmp_path))
    log_steps(run, 4)
    text = Page(write_page(run)).text
    assert "harvest 3 s, 60%" in text
    assert "train 1 s, 20%" in text
    assert "evaluate 1 s, 20%" in text
    assert "gpu_hours" not in text.partition("Details")[0]
    assert chart_of(run, "Seconds per step by stage").series[0].name == "harvest", "the longest first"


def test_boxes_and_the_clock_say_what_the_records_do(tmp_path):
    """Ten steps of 5 s, of which the first began 5 s before its end; rewards of 0.1 to 1."""
    run = write_run(tmp_path, recipe(tmp_path))
    records = [
        {"step": step, "time": 1000.0 + 5 * step, "time/step": 5.0, "reward/mean": step / 10,
         "harvest/tokens_per_second": 100.0 * step, "objective/skip_rate": 0.25}
        for step in range(1, 11)
    ]  # fmt: skip
    (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    assert facts(Columns(run, METRICS)) == [
        ("reward", "0.150 → 0.950", "mean of 2 steps at each end"),
        ("rollout", "550 tokens/s", "mean over steps"),
        ("time per step", "5 s", "mean of the newest 10; 50 s in all steps"),
    ]
    shares = chart_of(run, "Shares, %")
    assert (shares.series[0].y.tolist(), shares.series[0].last) == ([25.0] * 10, "25")
    assert [shares.clock[0], shares.clock[-1]] == ["5 s", "50 s"]


def test_charts_of_what_was_not_measured_are_left_out(tmp_path):
    run = write_run(tmp_path, recipe(tmp_path))
    log_steps(run, 3, **{"train/grad_norm": float("nan")})
    page = Page(write_page(run))
    assert "Entropy" in page.text
    assert "Pairs per stream" not in page.text
    assert "Gradient norm" not in page.text
    assert "KL to the teacher" not in page.text
    assert "not a number" in page.text


def test_rollouts_of_the_first_and_the_newest_steps_are_decoded(tmp_path):
    tokenizer = make_tokenizer(tmp_path / "model")
    asked = dataclasses.replace(prompt(1), question="<script>1 < 2</script>")
    stream = dataclasses.replace(example_stream(), prompt=asked)
    streams = {f"step-{n:08d}": [stream] for n in (0, 1, 6, 7)}
    run = write_run(tmp_path / "run", recipe(tmp_path / "model"), streams)
    page = Page(write_page(run))
    assert re.findall(r"Step (\d+) ", page.text) == ["8", "7", "1"]
    assert [row["step"] for row in drawn_rollouts(page)] == [8, 7, 1]
    shown = unpacked(drawn_rollouts(page)[0]["packed"])
    assert shown["question"] == asked.question
    side = shown["parts"][2]
    said = "reward 1, advantage 1, correct: 7, stop, 2 tokens, inherits 2, trained"
    assert ", ".join(side["facts"]) == said
    assert "".join(side["tokens"]) == tokenizer.decode([8, 9])
    assert "Token ids instead of text" not in page.text
    assert asked.question not in page.html, "it would be a script"


def test_one_rollout_a_prompt_is_shown_and_first_those_that_train(tmp_path):
    dull = example_stream()
    first, second = pairs_of(dull)
    second.a.grade = first.a.grade
    other = dataclasses.replace(dull, prompt=prompt(0), index=1)
    streams = [other, dull, dataclasses.replace(example_stream(), index=2)]
    run = write_run(tmp_path, recipe(tmp_path), {"step-00000000": streams})
    (run / "streams" / "step-00000001").mkdir()  # a harvest that has only begun
    shown = [(row["prompt"], row["title"][:8]) for row in drawn_rollouts(Page(write_page(run)))]
    assert shown == [("sums/a.parquet#1", "stream 2"), ("sums/a.parquet#0", "stream 1")]


def test_without_a_tokenizer_rollouts_are_token_ids_and_it_is_said(tmp_path):
    run = write_run(tmp_path, recipe(tmp_path / "gone"), {"step-00000000": [example_stream()]})
    page = Page(write_page(run))
    assert f"Token ids instead of text: {tmp_path / 'gone'}: expected a model folder" in page.text
    assert unpacked(drawn_rollouts(page)[0]["packed"])["parts"][2]["tokens"] == ["8 ", "9 "]


def test_the_page_is_part_of_the_built_package(tmp_path):
    command = [sys.executable, "setup.py", "-q", "build_py", "--build-lib", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    folders = ROOT / "megatron_eqlen/report", tmp_path / "megatron_eqlen/report"
    ours, built = ({path.name for path in folder.iterdir()} for folder in folders)
    assert ours - {"__pycache__", "README.md"} <= built


# ---- charts -------------------------------------------------------------------------------------------


def chart_of(run: Path, title: str) -> Chart:
    (chart,) = [chart for chart in charts(Columns(run, METRICS), []) if chart.title == title]
    return chart


def test_a_value_that_is_no_number_is_a_gap(tmp_path):
    run = write_run(tmp_path, recipe(tmp_path))
    writer = MetricsWriter(run)
    for step, entropy in enumerate([float("nan"), 1.0, float("inf")], 1):
        writer.write(step, {"loss/entropy": entropy})
    writer.close()
    data = chart_of(run, "Entropy, nats").data()
    assert data["series"][0]["columns"] == {"y": [None, 1.0, None]}
    json.dumps(data, allow_nan=False)


def test_long_series_are_averaged_not_sampled_and_have_a_moving_average():
    assert set(averaged(np.arange(10_000) % 2)) == {0.5}
    assert len(averaged(np.arange(10_001.0))) <= MAX_POINTS
    noisy = np.arange(400.0) + 10.0 * (np.arange(400) % 2)
    np.testing.assert_allclose(smoothed(noisy)[20:-20], np.arange(20.0, 380.0) + 5.0, atol=0.5)
    level = np.where(np.arange(200) % 7 < 2, np.nan, 3.0)
    np.testing.assert_allclose(smoothed(level), level, err_msg="gaps and ends are no zeros")


# ---- while a run trains -------------------------------------------------------------------------------


def test_a_page_is_written_while_a_run_trains_for_a_hundredth_of_its_time(tmp_path, monkeypatch):
    run, now, written = write_run(tmp_path, recipe(tmp_path)), [0.0], []

    def write(folder: Path) -> None:
        written.append(now[0])
        now[0] += 2.0

    monkeypatch.setattr("megatron_eqlen.report.page.time.monotonic", lambda: now[0])
    monkeypatch.setattr("megatron_eqlen.report.page.write_page", write)
    writer = PageWriter(run)
    for _ in range(1000):
        writer.update()
        now[0] += 1.0
    assert 3 <= len(written) <= 5
    assert 2.0 * len(written) <= now[0] / 100
