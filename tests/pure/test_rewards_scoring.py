"""Scoring: every ended response is graded, once, by its prompt's grader."""

import dataclasses
import sys

import pytest

import tests.kit.rollouts as kit
from megatron_eqlen.recipe import RewardRecipe
from megatron_eqlen.rewards.scoring import Scorer
from megatron_eqlen.sampling.equal_length.dual_track import pairs_of, tail_of
from megatron_eqlen.tokens import Tokens
from megatron_eqlen.types import Grade, Part, Prompt, Rollout

END = 0


class Letters:
    """A tokenizer whose token ids are code points."""

    def decode(self, token_ids: list[int]) -> str:
        return "".join(chr(token) for token in token_ids if token != END)


def segment(text: str, ended: bool = False, reason: str | None = None) -> Part:
    tokens = [ord(letter) for letter in text] + [END] * ended
    return Part(Tokens.of(tokens, [0.0] * len(tokens)), "stop" if ended else reason)


def prompt(name: str = "q", grader: str = "math", gold: str = "5", source: str = "sums") -> Prompt:
    return Prompt(name, [1], "What is 2 + 3?", grader, gold, source)


def make_stream(index: int = 0) -> Rollout:
    pairs = [
        (segment(r"x \boxed{5}", ended=True), segment(r"so it is \bo")),
        (segment("xed{6}", ended=True), segment("xed{5}", ended=True)),
    ]
    return kit.stream(prompt("q"), index, 0, pairs, "both_ended")


@pytest.fixture
def scorer():
    scorer = Scorer(RewardRecipe(math_rule="exact"), Letters())
    yield scorer
    scorer.close()


def test_a_segment_is_graded_as_the_whole_response_it_ends(scorer):
    """A_2 and B_2 hold half a box; with the trunk before them they are answers."""
    stream = make_stream()
    metrics = scorer.score([stream])
    assert [grade and grade.answer for grade in grades(stream)] == ["5", None, "6", "5"]
    assert [grade and grade.reward for grade in grades(stream)] == [1.0, None, 0.0, 1.0]
    assert metrics["reward/ended"] == 3
    assert metrics["reward/mean"] == metrics["reward/source/sums/mean"] == pytest.approx(2 / 3)
    assert metrics["reward/verdict/correct"] == pytest.approx(2 / 3)
    assert metrics["policy/reward"] == 1 / 2 * 1 + 1 / 4 * 0 + 1 / 4 * 1
    lengths = [len(tokens) for _, tokens in stream.ended()]
    assert metrics["policy/response_length"] == lengths[0] / 2 + lengths[1] / 2, "A_2 and B_2 end alike"


def grades(stream: Rollout) -> list[Grade | None]:
    return [side.grade for pair in pairs_of(stream) for side in (pair.a, pair.b)]


def test_an_ended_tail_is_graded_and_a_truncated_one_is_not(scorer):
    tails = segment("xed{5}", ended=True), segment("xed{5}", reason="length")
    ended, cut = (
        kit.stream(prompt("q"), 0, 0, pairs_of(make_stream())[:1], "max_pairs", tail) for tail in tails
    )
    scorer.score([ended, cut])
    assert tail_of(ended).grade.reward == 1.0
    assert tail_of(cut).grade is None


def test_equal_responses_are_graded_once_and_old_grades_stay(scorer, monkeypatch):
    streams = [make_stream(0), make_stream(1)]
    kept = Grade(0.25, "wrong")
    pairs_of(streams[0])[0].a.grade = kept
    decoded = []
    monkeypatch.setattr(Letters, "decode", lambda self, tokens: decoded.append(tokens) or "x")
    assert scorer.score(streams)["reward/calls"] == 3
    assert len(decoded) == 3
    assert pairs_of(streams[0])[0].a.grade is kept
    assert scorer.score(streams)["reward/calls"] == 0


def test_each_source_has_its_own_grader():
    def group(prompt: Prompt, text: str) -> Rollout:
        return kit.group(prompt, 0, [segment(text, ended=True)])

    scorer = Scorer(RewardRecipe(math_rule="exact", rubric=f"{__name__}:shorter_is_better"), Letters())
    rollouts = [group(prompt("a"), r"\boxed{5}"), group(prompt("b", "rubric", "10", "judged"), "12345")]
    metrics = scorer.score(rollouts)
    assert [rollout.parts[0].grade.reward for rollout in rollouts] == [1.0, 0.5]
    assert metrics["reward/source/judged/mean"] == 0.5
    assert rollouts[1].parts[0].grade.grader.endswith(":shorter_is_better")
    with pytest.raises(ValueError, match=r"expected a reward in \[0, 1\], got -4"):
        scorer.score([group(prompt("b", "rubric", "1", "judged"), "12345")])


def shorter_is_better(question: str, response: str, gold: str) -> float:
    return 1 - len(response) / int(gold)


def positional(question: str, text: str, gold: str) -> float:
    return 0.25 * (question == "?") + 0.25 * (text == "so") + 0.5 * (gold == "1")


def named(completion: str, answer: str, **others: object) -> float:
    return float((completion, answer, others["prompt"]) == ("so", "1", "?"))


async def awaited(completion: str) -> float:
    return 0.5 * (completion == "so")


@pytest.mark.parametrize(("function", "reward"), [(positional, 1.0), (named, 1.0), (awaited, 0.5)])
def test_a_grader_may_be_a_function_of_question_completion_and_answer(function, reward):
    scorer = Scorer(RewardRecipe(), Letters())
    path = f"{__name__}:{function.__name__}"
    asked = dataclasses.replace(prompt("b", path, "1"), question="?")
    (grade,) = scorer.grade_texts(["so"], [asked])
    assert (grade.reward, grade.grader) == (reward, path)


def test_mistakes_in_the_recipe_are_named():
    with pytest.raises(ValueError, match=r"expected package\.module:name, found 'rubric'"):
        Scorer(RewardRecipe(rubric="rubric"), Letters())
    with pytest.raises(ValueError, match="has no 'nothing'"):
        Scorer(RewardRecipe(rubric=f"{__name__}:nothing"), Letters())
    with pytest.raises(ValueError, match="'nowhere:at_all' cannot be imported: No module named 'nowhere'"):
        Scorer(RewardRecipe(rubric="nowhere:at_all"), Letters())
    with pytest.raises(ValueError, match=r"expected math, code, reasoning_gym, rubric or .*, found 'oracle'"):
        Scorer(RewardRecipe(), Letters()).grade_texts(["x"], [prompt(grader="oracle")])


def test_a_rubric_is_found_in_the_working_directory(tmp_path, monkeypatch):
    (tmp_path / "my_rubric.py").write_text("def half(question, response, gold):\n    return 0.5\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [path for path in sys.path if path])
    scorer = Scorer(RewardRecipe(rubric="my_rubric:half"), Letters())
    assert scorer.grade_texts(["x"], [prompt("b", "rubric", "1")])[0].reward == 0.5
