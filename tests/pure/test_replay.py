"""Recorded rollouts in place of an engine: a misfit is named before anything is trained."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import tests.kit.rollouts as kit
from megatron_eqlen.job import Job
from megatron_eqlen.record.reader import read_step
from megatron_eqlen.record.replayed import ReplayError, check_step, check_steps
from megatron_eqlen.types import Prompt, Rollout
from tests.kit.report_runs import example_group, example_stream, recipe


def streams_of(prompts: int, each: int) -> list[Rollout]:
    example = example_stream()
    return [
        replace(example, prompt=Prompt(f"a#{number}", [1], "?", "math", "7", number=number), index=index)
        for number in range(prompts)
        for index in range(each)
    ]


def record(home: Path, step: int, rollouts: list[Rollout]) -> Path:
    kit.record(home / f"step-{step:08d}" / "rank-0.arrow", rollouts)
    return home / f"step-{step:08d}"


def two_streams_of_three_prompts(**changes):
    data = {"max_prompt_length": 48, "prompts_per_step": 3, "sources": [{"name": "a", "path": "a"}]}
    return recipe(Path("m"), data=data, **{"group_size": 4} | changes)


def check(home: Path, rollouts: list[Rollout], **changes) -> None:
    folder = record(home, 0, rollouts)
    recipe = two_streams_of_three_prompts(**changes)
    check_step(folder, read_step(folder), recipe, Job(recipe).objective.dynamic_sampling)


def test_a_steps_own_record_is_accepted(tmp_path):
    check(tmp_path, streams_of(3, 2))


def test_rollouts_that_a_token_budget_left_out_are_not_missed(tmp_path):
    rollout = {"max_response_length": 192, "tokens_per_step": 100}
    check(tmp_path, streams_of(3, 2)[:-3], rollout=rollout)


def test_prompts_that_dynamic_sampling_drew_again_belong_to_the_step(tmp_path):
    check(tmp_path, streams_of(6, 2), objective="dapo")


OTHERS = {
    "another number of streams": (streams_of(3, 4), {},
     r"expected 2 rollouts .*group_size 4\), found 4 of a#0"),
    "fewer prompts": (streams_of(2, 2), {}, r"expected rollouts of 3 prompts .*, found 2"),
    "more prompts": (streams_of(4, 2), {}, r"expected rollouts of 3 prompts .*, found 4"),
    "another sampling": ([example_group()], {},
     "expected rollouts of sampling: equal_length, found independent"),
    "nothing": ([], {}, "expected rollouts of sampling: equal_length, found none"),
    "no routes": (streams_of(3, 2), {"rollout": {"max_response_length": 192, "keep_routes": True}},
     r"expected routes of all tokens, .*rollout\.record_routes\); change rollout\.keep_routes to train"),
    "a run stopped in the middle": (streams_of(3, 2)[:-1], {}, "expected 2 rollouts .*, found 1 of a#2"),
}  # fmt: skip


@pytest.mark.parametrize("case", OTHERS)
def test_the_record_of_another_recipe_is_refused_with_what_was_found(case, tmp_path):
    rollouts, changes, message = OTHERS[case]
    with pytest.raises(ReplayError, match=message):
        check(tmp_path, rollouts, **changes)


def test_a_step_that_is_missing_is_named_before_the_first_is_trained(tmp_path):
    for step in (0, 1, 3):
        record(tmp_path, step, streams_of(3, 2))
    check_steps(tmp_path, 0, 2)
    check_steps(tmp_path, 3, 4)
    check_steps(tmp_path, 0, None)
    with pytest.raises(
        ReplayError, match=r"step-00000000 to step-00000003, found 3 steps, .*: step-00000002 is missing"
    ):
        check_steps(tmp_path, 0, 4)
    with pytest.raises(ReplayError, match="found no step: step-00000000 is missing"):
        check_steps(tmp_path / "nowhere", 0, None)
