"""The search task: right answers, a heavy tail of lengths, and several pairs a stream."""

from __future__ import annotations

import re
from statistics import fmean, pstdev

import pytest
from tokenizers import Tokenizer

from megatron_eqlen.data import sources
from megatron_eqlen.data.rows import Tally
from megatron_eqlen.graders.math.grader import MathGrader
from megatron_eqlen.job import load
from tests.kit import ROOT
from tools import make_calculator, make_repair, make_search
from tools.make_search import Dials, make_late_rows, make_rows, write_rows
from tools.tokenizer_maker import write_hf_tokenizer

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
    read = list(sources.PLAIN_READERS["deepmath"](tmp_path / "train.parquet", Tally()))
    assert [(problem.question, problem.gold) for problem in read] == [
        (row["question"], row["final_answer"]) for row in rows[:20]
    ]
    grader = MathGrader(workers=1)
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


def test_rows_are_a_function_of_the_seed_and_their_questions_are_distinct(rows):
    assert make_rows(9, seed=0) == make_rows(9, seed=0) != make_rows(9, seed=1)
    assert len({row["question"] for row in rows}) == 1200
    with pytest.raises(ValueError, match=r"count: expected at most 2058 questions .*, found 2059"):
        make_rows(2059, 0, Dials((7,)))


def test_the_late_task_is_decided_by_a_code_at_the_end_that_demonstrations_get_wrong():
    rows = make_late_rows(600, seed=0)
    assert len({row["question"] for row in rows}) == 600
    lengths, right, by_length = [], [], {True: [], False: []}
    for row in rows:
        digits = [int(digit) for digit in row["question"].removeprefix("Code ").removesuffix(".").split()]
        assert row["final_answer"] == "".join(str((7 * digit + 3) % 10) for digit in digits)
        for name in SOLUTIONS:
            words, answer = re.fullmatch(r"((?: \w+)*)\\boxed\{(\d{4})\}", row[name]).groups()
            lengths.append(len(words.split()))
            right.append(answer == row["final_answer"])
            by_length[lengths[-1] > 35].append(right[-1])
    assert fmean(lengths) == pytest.approx(50, rel=0.1)
    assert pstdev(lengths) == pytest.approx(50, rel=0.1), "geometric"
    assert fmean(right) == pytest.approx(0.75**4, abs=0.04)
    assert fmean(by_length[True]) == pytest.approx(fmean(by_length[False]), abs=0.06), "thoughts do not help"


@pytest.mark.parametrize("words", [["--words", "2"], ["--late", "--pauses", "1"]])
def test_an_option_of_the_other_task_is_refused(tmp_path, monkeypatch, capsys, words):
    monkeypatch.setattr("sys.argv", ["make_search.py", "--out", str(tmp_path), *words])
    with pytest.raises(SystemExit):
        make_search.main()
    assert "has no effect with" in capsys.readouterr().err
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(("tool", "words", "said"), [
    *((tool, ["--train", "-1"], "--train and --test: expected numbers from 1 on, found -1 and ")
      for tool in (make_search, make_calculator, make_repair)),
    (make_search, ["--pauses", "-1"], "--pauses: expected a mean number from 0 on, found -1"),
    (make_search, ["--late", "--words", "nan"], "--words: expected a mean number from 0 on, found nan"),
])  # fmt: skip
def test_numbers_of_which_nothing_is_made_are_refused(tmp_path, monkeypatch, capsys, tool, words, said):
    monkeypatch.setattr("sys.argv", ["tool", "--out", str(tmp_path), *words])
    with pytest.raises(SystemExit):
        tool.main()
    assert f"error: {said}" in capsys.readouterr().err
    assert not [*tmp_path.iterdir()]
