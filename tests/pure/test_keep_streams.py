"""Recorded rollouts of old steps are removed as ``report.keep_streams`` says."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_eqlen.files import step_name
from megatron_eqlen.recipe import Recipe
from megatron_eqlen.run.run_folder import RunFolder
from tests.kit.recipes import small


def make_recipe(folder: Path, keep: str | int, every: int, **over) -> Recipe:
    evaluation = {"every": every, "benchmarks": [{"name": "b", "path": "none"}]}
    return small(steps=9, run_dir=str(folder), report={"keep_streams": keep}, evaluation=evaluation, **over)


@pytest.mark.parametrize(("keep", "left"), [
    ("all", range(8)), (1, [5, 6, 7]), (4, [2, 3, 4, 5, 6, 7]), ("evaluations", [2, 5, 6, 7]),
])  # fmt: skip
def test_steps_that_are_named_stay_and_those_that_a_resumed_run_reads(tmp_path, keep, left):
    recipe = make_recipe(tmp_path, keep, every=3)
    folder = RunFolder(recipe)
    for number in range(8):
        (folder.streams / step_name(number)).mkdir(parents=True)
    (folder.streams / "notes").mkdir()
    folder.remove_old_streams(recipe, saved=6)
    assert sorted(path.name for path in folder.streams.iterdir()) == ["notes", *map(step_name, left)]


@pytest.mark.parametrize("oldest", [4, 3], ids=["every 2 steps", "step 5 was skipped"])
def test_with_carry_over_the_step_before_each_checkpoint_stays(tmp_path, oldest):
    """The newest checkpoint is of step 6; the one before is kept as well."""
    recipe = make_recipe(
        tmp_path, 1, every=3, rollout={"carry_over": True, "tokens_per_step": 9, "keep_sampling_mask": True},
        loss={"rollout_is": "token"}, checkpoint={"every": 2, "keep": 2},
    )  # fmt: skip
    folder = RunFolder(recipe)
    for number in range(8):
        (folder.streams / step_name(number)).mkdir(parents=True)
    for number in (oldest, 6):
        (folder.checkpoints / step_name(number)).mkdir(parents=True)
    folder.remove_old_streams(recipe, saved=6)
    assert [path.name for path in sorted(folder.streams.iterdir())] == [*map(step_name, range(oldest - 2, 8))]


def test_evaluations_that_never_are_keep_nothing_so_they_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"report\.keep_streams: evaluations needs evaluation\.every >= 1"):
        make_recipe(tmp_path, "evaluations", every=0)
