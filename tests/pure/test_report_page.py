"""The page: right numbers, one well-formed file with everything in it, whatever the run folder lacks."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from megatron_eqlen.evaluation.result import Answers, EvaluationResult, write_results
from megatron_eqlen.report.chart import Series, averaged, line_chart, stacked_bars
from megatron_eqlen.report.metrics import MetricsWriter
from megatron_eqlen.report.page import write_page
from tests.kit import ROOT
from tests.kit.report_runs import example_stream, make_tokenizer, prompt, recipe, write_run

VOID = {"meta", "br"}
"""Elements of the page that have no end tag; SVG's shapes close themselves."""


class Page(HTMLParser):
    """Checks that tags close in order, collects text and references."""

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
        if "style" not in self.open:
            self.words.append(data)


def log_steps(run: Path, steps: int, **extra: float) -> None:
    writer = MetricsWriter(run)
    for step in range(1, steps + 1):
        stages = {
            "time/harvest": 3.0,
            "time/train": 1.0,
            "time/evaluate": 1.0,
            "time/step": 5.0,
            "time/gpu_hours": 100.0 * step,
        }
        writer.write(step, {"reward/mean": step / steps, "loss/entropy": 1.0, **stages, **extra})
    writer.close()


def evaluate(run: Path, label: str, rewards: np.ndarray) -> None:
    """``rewards`` [P, k]."""
    answers = [
        Answers(f"p{n}", [float(r) for r in row], ["correct" if r else "wrong" for r in row], [10] * len(row))
        for n, row in enumerate(rewards)
    ]
    manifest = {"question_ids": [one.prompt_id for one in answers]}
    write_results(run / "evaluation" / f"{label}.json", [EvaluationResult("sums", answers, manifest)])


def test_a_run_that_has_only_begun_has_a_page(tmp_path):
    page = Page(write_page(write_run(tmp_path, recipe(tmp_path))))
    assert "0 of 20 steps" in page.text
    assert "No step has been taken yet" in page.text
    assert "recorded no rollouts" in page.text
    assert page.references == []
    assert not re.search(r"https?:|url\(|@import", page.html)


def test_the_headline_is_accuracy_before_and_after_with_its_paired_gain(tmp_path):
    run = write_run(tmp_path, recipe(tmp_path))
    log_steps(run, 4)
    before = np.array([[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 0, 0], [1, 1, 1, 0]])
    evaluate(run, "after", np.maximum(before, [1, 0, 0, 1]))
    evaluate(run, "step-00000002", before)
    evaluate(run, "before", before)
    page = Page(write_page(run))
    assert "37.5% → 68.8%" in page.text
    assert re.search(r"\+31\.2 \[\+?-?\d+\.\d, \+\d+\.\d\] points", page.text)
    labels = re.findall(r"4 problems × 4 (before|step-00000002|after)", page.text)
    assert labels == ["before", "step-00000002", "after"]


def test_only_stages_share_out_a_step(tmp_path):
    run = write_run(tmp_path, recipe(tmp_path))
    log_steps(run, 4)
    text = Page(write_page(run)).text
    assert "harvest 3 s, 60%" in text
    assert "train 1 s, 20%" in text
    assert "evaluate 1 s, 20%" in text
    assert "gpu_hours" not in text.partition("Details")[0]


def test_charts_of_what_was_not_measured_are_left_out(tmp_path):
    run = write_run(tmp_path, recipe(tmp_path))
    log_steps(run, 3, **{"train/grad_norm": float("nan")})
    page = Page(write_page(run))
    assert "Entropy" in page.text
    assert "Pairs per stream" not in page.text
    assert "Gradient norm" not in page.text
    assert "not a number" in page.text


def test_rollouts_of_the_first_and_last_step_are_decoded(tmp_path):
    tokenizer = make_tokenizer(tmp_path / "model")
    asked = dataclasses.replace(prompt(1), question="<script>1 < 2</script>")
    stream = dataclasses.replace(example_stream(), prompt=asked)
    streams = {f"step-{n:08d}": [stream] for n in (0, 1, 7)}
    run = write_run(tmp_path / "run", recipe(tmp_path / "model"), streams)
    page = Page(write_page(run))
    assert "Step 1 " in page.text
    assert "Step 8 " in page.text
    assert "Step 2 " not in page.text
    assert "Pair 2 · 2 tokens a side · inherits 2" in page.text
    assert "reward 1 · advantage 1 · correct: 7 · stop · 2 tokens · trained" in page.text
    assert tokenizer.decode([8]) in page.text
    assert "Token ids instead of text" not in page.text
    assert "<script>1 < 2</script>" in page.text  # as text:
    assert "<script" not in page.html


def test_one_rollout_a_prompt_is_shown_and_first_those_that_train(tmp_path):
    dull = example_stream()
    dull.pairs[1].a.grade = dull.pairs[0].a.grade
    other = dataclasses.replace(dull, prompt=prompt(0), index=1)
    streams = [other, dull, dataclasses.replace(example_stream(), index=2)]
    run = write_run(tmp_path, recipe(tmp_path), {"step-00000000": streams})
    (run / "streams" / "step-00000001").mkdir()  # a harvest that has only begun
    shown = re.findall(r"(sums/a\.parquet#\d) (stream \d)", Page(write_page(run)).text)
    assert shown == [("sums/a.parquet#1", "stream 2"), ("sums/a.parquet#0", "stream 1")]


def test_without_a_tokenizer_rollouts_are_token_ids_and_it_is_said(tmp_path):
    run = write_run(tmp_path, recipe(tmp_path / "gone"), {"step-00000000": [example_stream()]})
    text = Page(write_page(run)).text
    assert f"Token ids instead of text: {tmp_path / 'gone'}: expected a model folder" in text
    assert "8 9" in text


def test_a_folder_that_is_no_run_is_named(tmp_path):
    with pytest.raises(ValueError, match=f"{tmp_path}: expected a run folder with a recipe.yaml"):
        write_page(tmp_path)


def test_the_template_is_part_of_the_built_package(tmp_path):
    command = [sys.executable, "setup.py", "-q", "build_py", "--build-lib", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    assert (tmp_path / "megatron_eqlen" / "report" / "page.html.jinja").is_file()


# ---- charts -------------------------------------------------------------------------------------------


def test_a_line_runs_through_its_points_to_scale():
    points = [(1, 0.0), (2, 5.0), (3, 10.0)]
    (line,) = ET.fromstring(line_chart("t", [Series("s", points)])).iter("polyline")
    (x1, y1), (x2, y2), (x3, y3) = (map(float, pair.split(",")) for pair in line.get("points").split())
    assert x1 < x2 < x3
    assert y1 > y2 > y3
    assert (x2, y2) == (pytest.approx((x1 + x3) / 2, abs=0.1), pytest.approx((y1 + y3) / 2, abs=0.1))


@pytest.mark.parametrize(
    "values", [[0.0], [0.0, 0.0], [1e-9, 2e-9], [-3.0, -3.0], [1e12, -1e12], [0.1 + 0.2, 0.3]]
)
def test_any_values_make_a_chart_whose_marks_lie_inside(values):
    svg = ET.fromstring(line_chart("t", [Series("s", list(enumerate(values, 1)))]))
    _, _, width, height = map(float, svg.get("viewBox").split())
    for circle in svg.iter("circle"):
        assert 0 <= float(circle.get("cx")) <= width
        assert 0 <= float(circle.get("cy")) <= height


def test_stacked_bars_have_heights_in_proportion_and_touch():
    series = [Series("a", [(1, 3.0), (2, 1.0)]), Series("b", [(1, 1.0), (2, 1.0)])]
    rects = list(ET.fromstring(stacked_bars("t", series)).iter("rect"))
    y = [float(rect.get("y")) for rect in rects]
    height = [float(rect.get("height")) for rect in rects]
    a1, a2, b1, b2 = range(4)
    assert height[a1] == pytest.approx(3 * height[a2], abs=0.3)
    assert height[b1] == pytest.approx(height[b2], abs=0.2)
    assert y[b1] + height[b1] == pytest.approx(y[a1], abs=0.2)


def test_long_series_are_averaged_not_sampled():
    points = [(step, float(step % 2)) for step in range(10_000)]
    fewer = averaged(points, 100)
    assert len(fewer) == 100
    assert {y for _, y in fewer} == {0.5}


def test_nothing_to_draw_is_no_chart():
    assert line_chart("t", [Series("s", [])]) == ""
    charts = line_chart("t", [Series("none", []), Series("some", [(1, 1.0)])])
    assert ('class="c1"' in charts, 'class="c0"' in charts) == (True, False), "the colour of the legend"
    assert stacked_bars("t", []) == ""
