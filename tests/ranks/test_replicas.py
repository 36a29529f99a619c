"""Ranks as engine replicas: who generates what, who grades what, and that all end with the same rollouts."""

from __future__ import annotations

import pytest

from megatron_eqlen.replicas import Replicas, shared
from megatron_eqlen.types import Grade, Group, Prompt, Segment
from tests.kit.distributed import run_ranks

PROMPTS = [Prompt(f"q{number}", [1], "?", "math", "1", number=number) for number in range(7)]


def harvest_and_grade(engine_size: int, in_step: bool) -> tuple[list[str], list[tuple[str, str]], list[str]]:
    """(what this rank has harvested, what it graded, everyone's with the grade's maker)."""
    import torch.distributed as dist

    replicas = Replicas(engine_size, in_step)
    harvested = [Group(prompt, 0, [Segment([9], [0.0], "stop")]) for prompt in replicas.share(PROMPTS)]
    part = replicas.part(harvested)
    for group in part:
        group.completions[0].grade = Grade(1.0, "correct", grader=f"rank {dist.get_rank()}")
    everyone = shared(part, PROMPTS)
    return (
        [group.prompt_id for group in harvested],
        [(group.prompt_id, group.completions[0].grade.grader) for group in everyone],
        [group.prompt_id for group in part],
    )


@pytest.mark.parametrize(
    ("ranks", "engine_size", "in_step"),
    [(2, 2, True), (2, 1, True), (4, 2, True), (2, 2, False)],
    ids=["one replica of two", "two replicas", "two replicas of two", "servers, driven by the first rank"],
)
def test_every_response_is_graded_once_and_reaches_every_rank(ranks, engine_size, in_step):
    answers = run_ranks(ranks, harvest_and_grade, engine_size, in_step)
    graded = [prompt for _, _, part in answers for prompt in part]
    assert sorted(graded) == [prompt.prompt_id for prompt in PROMPTS]
    assert all(everyone == answers[0][1] for _, everyone, _ in answers)
    assert [prompt for prompt, _ in answers[0][1]] == [prompt.prompt_id for prompt in PROMPTS]
    if in_step and engine_size == 2:
        assert answers[0][0] == answers[1][0], "both ranks of a replica hold all that it harvested"
        assert abs(len(answers[0][2]) - len(answers[1][2])) <= 1, "and share the grading"
