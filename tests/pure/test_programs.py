"""Tiny programs: the real reader takes their rows, and the real sandbox their solutions."""

from __future__ import annotations

import re

import pytest

from megatron_eqlen.data import opencodereasoning
from megatron_eqlen.data.rows import Tally
from megatron_eqlen.rewards.code.grader import CodeGrader
from megatron_eqlen.toys.programs import TASKS, make_rows, write


def test_the_sandbox_passes_every_right_solution_and_no_wrong_one(tmp_path):
    rows, records = make_rows(24, seed=0)
    write(tmp_path, rows, records)
    tally = Tally()
    problems = {
        problem.row_id: problem
        for problem in opencodereasoning.read(tmp_path / "split_0", tally, tests=str(tmp_path / "tests"))
    }
    assert not tally.dropped
    assert [*problems] == [row["id"] for row in rows]
    assert all(row["input"] in problems[row["id"]].question for row in rows)
    grader = CodeGrader(workers=2, timeout=5.0, memory_mb=512)
    golds = [problems[row["id"]].gold for row in rows]
    wrong = [re.sub(r"print\((.*)\)", r"print(\1 + 1)", row["output"]) for row in rows]
    try:
        right = grader.grade([row["output"] for row in rows], golds)
        failed = grader.grade(wrong, golds)
    finally:
        grader.close()
    assert {grade.verdict for grade in right} == {"passed"}
    assert {grade.reward for grade in failed} == {0.0}


def test_a_task_does_what_its_words_say():
    (task,) = (
        candidate
        for candidate in TASKS
        if "that are even. Print the sum of their squares." in candidate.question
    )
    assert task.answer([3, 4, -2, 7]) == 20
    assert task.answer([1]) == 0
    assert len({candidate.question for candidate in TASKS}) == len(TASKS)


def test_rows_are_a_function_of_the_seed():
    assert make_rows(40, 1) == make_rows(40, 1) != make_rows(40, 2)
    with pytest.raises(ValueError, match=f"count: expected at most {len(TASKS)} programs, found 10000"):
        make_rows(10000, 0)
