"""The search task: right answers, a heavy tail of lengths, and several pairs a stream."""

from __future__ import annotations

import random
import re
from statistics import fmean, pstdev

import pytest
from tokenizers import Tokenizer

from megatron_eqlen.data import math_sets
from megatron_eqlen.data.rows import Tally
from megatron_eqlen.objectives.recipes import load
from megatron_eqlen.rewards.math.grader import MathGrader
from megatron_eqlen.toys.search import Dials, draw_puzzle, make_rows, search
from megatron_eqlen.toys.synthetic import write_rows
from megatron_eqlen.toys.tokenizer_maker import write_hf_tokenizer
from tests.kit import ROOT

SOLUTIONS = ("r1_solution_1", "r1_solution_2", "r1_solution_3")
SEARCH = ROOT / "recipes/search_cpu.yaml"
LINE = re.compile(r"(\d)\*(\d)=(\d)\+(\d)=(\d)\+(\d)=(\d)\+(\d)=(\d)")
QUESTION = re.compile(r"Find \$x\$ with \$(\d)x\+(\d)\+(\d)\+(\d)=0\$ modulo \$(\d)\$\.")


@pytest.fixture(scope="module")
def rows() -> list[dict]:
    return make_rows(1200, seed=0)


def test_every_line_and_every_answer_is_right(rows):
    for row in rows:
        found = QUESTION.fullmatch(row["question"])
        assert found is not None
        factor, *offsets, modulus = map(int, found.groups())
        answer = int(row["final_answer"])
        assert [x for x in range(modulus) if (factor * x + sum(offsets)) % modulus == 0] == [answer]
        for name in SOLUTIONS:
            *lines, box = row[name].splitlines()
            assert box == f"\\boxed{{{answer}}}"
            for line in lines:
                if line != "Check:":
                    first, x, product, *sums = map(int, LINE.fullmatch(line.removesuffix(" no")).groups())
                    assert (first, product) == (factor, factor * x % modulus)
                    assert sums[::2] == offsets
                    so_far = [(product + sum(offsets[:n])) % modulus for n in (1, 2, 3)]
                    assert sums[1::2] == so_far
                    assert not (line.endswith(" no") and so_far[-1] == 0)


def test_the_real_reader_and_grader_take_the_rows(rows, tmp_path):
    write_rows(tmp_path / "train.parquet", rows[:20])
    read = list(math_sets.read_deepmath(tmp_path / "train.parquet", Tally()))
    assert [(problem.question, problem.gold) for problem in read] == [
        (row["question"], row["final_answer"]) for row in rows[:20]
    ]
    grader = MathGrader("either", workers=1)
    try:
        grades = grader.grade([row["r1_solution_1"] for row in rows[:20]], [problem.gold for problem in read])
    finally:
        grader.close()
    assert {grade.verdict for grade in grades} == {"correct"}


def test_lengths_have_a_heavy_tail_of_which_a_few_percent_reach_the_recipes_limit(rows, tmp_path):
    write_hf_tokenizer(tmp_path, [f"{row['question']}\n{row['r1_solution_1']}" for row in rows])
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    lengths = [len(tokenizer.encode(row[name]).ids) + 1 for row in rows for name in SOLUTIONS]
    limit = load(SEARCH).rollout.max_response_length
    assert pstdev(lengths) / fmean(lengths) >= 0.8
    assert 0.005 < fmean(length > limit for length in lengths) < 0.05


def test_who_imitates_it_is_right_half_of_the_time():
    """An imitator that gives up can only guess among the modulus' values."""
    rng = random.Random(1)
    right = []
    for _ in range(4000):
        puzzle = draw_puzzle(rng, Dials())
        tried = [*search(puzzle, Dials(), rng)]
        right.append(1.0 if tried[-1:] == [puzzle.answer] else 1 / puzzle.modulus)
    assert 0.4 < fmean(right) < 0.6


def test_the_dials_shape_lengths_and_right_answers():
    def mean_tries(dials: Dials) -> float:
        rng = random.Random(3)
        return fmean(len([*search(draw_puzzle(rng, dials), dials, rng)]) for _ in range(3000))

    forever = Dials((7,), gives_up=0.0, in_order=0.0)
    assert mean_tries(forever) == pytest.approx(7, rel=0.05), "a geometric distribution's mean"
    assert mean_tries(Dials((7,), gives_up=0.0, in_order=1.0)) == pytest.approx(4, rel=0.05)
    assert mean_tries(Dials((5,), gives_up=0.0, in_order=0.0)) == pytest.approx(5, rel=0.05)
    assert mean_tries(Dials((7,), gives_up=0.5, in_order=0.0)) < 1


def test_rows_are_a_function_of_the_seed_and_their_questions_are_distinct(rows):
    assert make_rows(1200, seed=0) == rows != make_rows(1200, seed=1)
    assert len({row["question"] for row in rows}) == 1200
    with pytest.raises(ValueError, match=r"count: expected at most 2058 questions .*, found 2059"):
        make_rows(2059, 0, Dials((7,)))
