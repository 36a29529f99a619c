"""The search task: right answers, a heavy tail of lengths, and several pairs a stream."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from statistics import fmean, pstdev

import pytest
from tokenizers import Tokenizer

from megatron_eqlen.data import sources
from megatron_eqlen.data.rows import Tally
from megatron_eqlen.graders.math.grader import MathGrader
from megatron_eqlen.objectives.recipes import load
from megatron_eqlen.sampling.equal_length.dual_track import DualTrack, pairs_of
from megatron_eqlen.types import Delta, Prompt, Rollout
from tests.kit import ROOT
from tests.kit.marks import EACH_WEEK
from tools.make_search import (
    PAPERS_REGIME,
    Dials,
    Puzzle,
    draw_puzzle,
    make_late_rows,
    make_rows,
    pieces,
    search,
    write_rows,
)
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


def test_an_imitator_of_the_search_is_right_half_of_the_time():
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
    assert make_rows(9, seed=0) == make_rows(9, seed=0) != make_rows(9, seed=1)
    assert len({row["question"] for row in rows}) == 1200
    with pytest.raises(ValueError, match=r"count: expected at most 2058 questions .*, found 2059"):
        make_rows(2059, 0, Dials((7,)))


class Redrawn(random.Random):
    """Repeats the ``known`` numbers, then draws new ones."""

    def __init__(self, known: list[float], seed: float) -> None:
        super().__init__(seed)
        self.known, self.drawn, self.written = [*known], [], 0

    def random(self) -> float:
        value = self.known.pop(0) if self.known else super().random()
        self.drawn.append((self.written, value))
        return value

    def randrange(self, stop: int) -> int:
        return int(self.random() * stop)


class Imitator:
    """Continues demonstrations of one puzzle token by token, as a model does that has learned them."""

    TOKEN = re.compile(r"\\boxed\{| ?[A-Za-z]+| \.|[\s\S]")

    def __init__(self, puzzle: Puzzle, dials: Dials, rng: random.Random) -> None:
        self.puzzle, self.dials, self.rng = puzzle, dials, rng
        self.ids: dict[str, int] = {}

    def respond(self, start: int = 0, known: Sequence[tuple[int, float]] = ()) -> tuple[list[int], list]:
        """Return a response that repeats what was drawn before token ``start``, and its draws."""
        rng = Redrawn([value for written, value in known if written < start], self.rng.random())
        tokens = []
        for piece in pieces(self.puzzle, self.dials, rng):
            tokens += [self.ids.setdefault(token, len(self.ids) + 1) for token in self.TOKEN.findall(piece)]
            rng.written = len(tokens)
        return [*tokens, 0], rng.drawn

    def stream(self, limit: int) -> Rollout:
        harvester = DualTrack(Prompt("q", [0], "?", "math", "1"), 0, limit, frozenset([0]), 0)
        drawn: dict[str, list] = {}
        launched = harvester.start()
        while not harvester.complete:
            for track in launched:
                start = len(track.context) - 1
                known = drawn[next(iter(harvester.open.values())).name] if start else []
                tokens, drawn[track.name] = self.respond(start, known)
                rest = tokens[start:limit]
                track.extend(Delta(track.name, rest, {"logprobs": [0.0] * len(rest)}), 0)
            launched = harvester.advance()
        return harvester.rollout(0)


@EACH_WEEK
def test_the_papers_regime_has_six_to_nine_pairs_a_stream_and_few_that_both_tracks_end():
    rng = random.Random(0)
    imitators = [Imitator(draw_puzzle(rng, PAPERS_REGIME), PAPERS_REGIME, rng) for _ in range(400)]
    lengths = [len(imitator.respond()[0]) for imitator in imitators]
    streams = [imitator.stream(round(3 * fmean(lengths))) for imitator in imitators]
    assert 6 < fmean(len(pairs_of(stream)) for stream in streams) < 9
    assert fmean(stream.outcome == "both_ended" for stream in streams) < 0.06
    assert pstdev(lengths) / fmean(lengths) > 0.5


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
