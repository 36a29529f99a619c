"""The end of a run: steps, GPU hours, or the first of both; every part of the package reports which."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from megatron_eqlen.cli import __main__ as cli
from megatron_eqlen.job import load
from megatron_eqlen.recipe import RecipeError
from megatron_eqlen.recipe.budget import Budget, Spent
from megatron_eqlen.recipe.load import dump
from megatron_eqlen.report.page import write_page
from megatron_eqlen.report.progress import Progress
from megatron_eqlen.report.status import is_complete
from tests.kit import ROOT
from tests.kit.report_runs import recipe, write_run


def end_of(budget: Budget, steps: int, hours: float) -> str:
    """Return the last line on the screen of a run that stopped there."""
    out = io.StringIO()
    progress = Progress(budget, "run", console=Console(file=out, width=160, soft_wrap=True))
    progress.step(steps, {"time/gpu_hours": hours})
    progress.finish(Path("report.html"))
    return out.getvalue().splitlines()[-1]


@pytest.mark.parametrize(("budget", "steps", "hours", "key", "said"), [
    (Budget(30, None), 30, 9.0, "steps", "30 of 30 steps"),
    (Budget(30, None), 29, 9.0, None, "29 of 30 steps"),
    (Budget(None, 2.5), 17, 2.6, "gpu_hours", "17 steps, 2.6 of 2.5 GPU hours (ended by gpu_hours)"),
    (Budget(30, 2.5), 17, 2.6, "gpu_hours", "17 of 30 steps, 2.6 of 2.5 GPU hours (ended by gpu_hours)"),
    (Budget(30, 2.5), 30, 0.4, "steps", "30 of 30 steps, 0.4 of 2.5 GPU hours (ended by steps)"),
    (Budget(None, 2.5), 17, 2.4, None, "17 steps, 2.4 of 2.5 GPU hours,"),
])  # fmt: skip
def test_the_limit_that_ends_a_run_is_said(budget, steps, hours, key, said):
    assert budget.ended_by(Spent(steps, hours)) == key
    assert said in end_of(budget, steps, hours)


def test_steps_may_be_left_out_with_gpu_hours_and_not_without(tmp_path, capsys):
    file = tmp_path / "recipe.yaml"
    file.write_text(dump(recipe(tmp_path)))
    assert load(file, ["steps=null", "gpu_hours=3"]).budget == Budget(None, 3.0)
    expected = "steps: expected this, or one of gpu_hours, generated_tokens, flops, to end a run, found none"
    with pytest.raises(RecipeError, match=expected):
        load(file, ["steps=null"])
    with pytest.raises(RecipeError, match="lr_schedule: cosine acts only with steps set, found null"):
        load(file, ["steps=null", "gpu_hours=3", "optimizer.lr_schedule=cosine"])
    shipped = str(ROOT / "recipes/qwen3_32b.yaml")
    assert cli.main(["plan", shipped, "gpu_hours=64"]) == 0
    assert "end         500 steps or 64 GPU hours, whichever comes first" in capsys.readouterr().out
    assert cli.main(["plan", shipped, "gpu_hours=64", "steps=null"]) == 0
    assert "end         64 GPU hours\n" in capsys.readouterr().out


def test_the_page_and_the_folder_know_the_end(tmp_path):
    run = recipe(tmp_path, steps=None, gpu_hours=2.0, run_dir=str(tmp_path / "run"))
    folder = write_run(tmp_path / "run", run)
    (folder / "export").mkdir()
    for hours, ended in ((1.9, False), (2.1, True)):
        record = {"step": 7, "time": 0.0, "time/gpu_hours": hours}
        (folder / "metrics.jsonl").write_text(json.dumps(record) + "\n")
        page = write_page(folder).read_text()
        assert ("(ended by gpu_hours)" in page) == ended
        assert is_complete(run.run_folder, run) == ended
    (folder / "metrics.jsonl").unlink()
    assert not is_complete(run.run_folder, run), "nothing says that it has"


def test_the_time_left_is_estimated_by_the_nearer_limit():
    assert Budget(30, None).steps_left(Spent(10, 1.0)) == 20
    assert Budget(30, 1.5).steps_left(Spent(10, 1.0)) == pytest.approx(5)
    assert Budget(None, 1.5).steps_left(Spent()) is None
    assert Budget(None, 1.5).steps_left(Spent(10, 1.6)) == 0
