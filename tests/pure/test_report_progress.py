"""The display: one line a step, silence on other ranks."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from megatron_eqlen.recipe.budget import Budget, Spent
from megatron_eqlen.report.format import compact, duration
from megatron_eqlen.report.progress import Progress

METRICS = {
    "reward/mean": 0.5125, "harvest/pairs_per_stream": 2.25, "harvest/ended_response_length": 96.3,
    "mismatch/kl": 1.3e-6, "harvest/tokens_per_second": 812.4, "train/tokens_per_second": 14230.0,
    "loss/entropy": 1.0, "time/step": 4.0,
}  # fmt: skip


def run_steps(progress: Progress, steps: range) -> None:
    for number in steps:
        progress.step(number, METRICS)


def display(**keys) -> tuple[Progress, io.StringIO]:
    out = io.StringIO()
    console = Console(file=out, width=160, highlight=False, soft_wrap=True)
    return Progress(Budget(30, None), "tiny eqlen-grpo", console=console, **keys), out


def test_a_log_gets_one_plain_line_a_step():
    progress, out = display()
    progress.resume(Spent())
    progress.say("before: avg@8 43.1% [39.0, 47.2], found ['x'] in [/runs/a]")
    run_steps(progress, range(1, 30))
    lines = out.getvalue().splitlines()
    assert lines[0] == "before: avg@8 43.1% [39.0, 47.2], found ['x'] in [/runs/a]", "brackets are no markup"
    assert lines[-1] == (
        "step 29/30  reward 0.512  pairs/stream 2.25  length 96.3  mismatch KL 1.3e-06  "
        "rollout 812 tok/s  train 14.2k tok/s  4.0 s  4 s left"
    )
    assert len(lines) == 1 + 29
    assert "\x1b" not in out.getvalue()


def test_the_time_left_is_by_the_newest_ten_steps():
    progress, out = display()
    for number in range(1, 26):
        progress.step(number, {"time/step": 100.0 if number <= 15 else 2.0})
    assert out.getvalue().splitlines()[-1] == "step 25/30  2.0 s  10 s left"


def test_a_resumed_run_says_so_and_counts_on():
    progress, out = display()
    progress.resume(Spent(10))
    run_steps(progress, range(11, 12))
    progress.finish(Path("runs/tiny/report.html"), "sums 40.1% -> 80.0%")
    said, step, end = out.getvalue().splitlines()
    assert said == "resumes after 10 of 30 steps"
    assert step.startswith("step 11/30")
    assert step.endswith("1:16 left")
    assert "11 of 30 steps, sums 40.1% -> 80.0%, " in end
    assert end.endswith("see runs/tiny/report.html")


def test_what_was_not_measured_is_left_out():
    progress, out = display()
    progress.step(1, {"objective/reward_mean": 0.25, "harvest/response_length": 50.0})
    assert out.getvalue() == "step 1/30  reward 0.250  length 50\n"


def test_other_ranks_are_silent():
    progress, out = display(show=False)
    progress.resume(Spent(3))
    run_steps(progress, range(4, 8))
    progress.say("after: better")
    progress.finish(Path("report.html"))
    assert out.getvalue() == ""


@pytest.mark.parametrize(("value", "text"), [
    (0.0, "0"), (2.0, "2"), (1234.5, "1234"), (3.2e6, "3.2M"), (2e11, "200G"), (-1.3e-6, "-1.3e-06"),
    (None, "–"), (float("nan"), "nan"), (1e4, "10k"), (9999.0, "9999"), (1e-3, "0.001"), (9.9e-4, "9.9e-04"),
])  # fmt: skip
def test_numbers_have_about_three_digits(value, text):
    assert compact(value) == text


@pytest.mark.parametrize(("seconds", "text"), [(9.4, "9 s"), (92, "1:32"), (59.6, "1:00"), (7500, "2:05:00")])
def test_durations(seconds, text):
    assert duration(seconds) == text
