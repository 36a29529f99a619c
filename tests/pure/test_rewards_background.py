"""Grading begins when a response ends: overlap, waiting, and errors."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tests.kit.rollouts as kit
from megatron_eqlen.harvest.harvest import harvest
from megatron_eqlen.harvest.harvest_plan import HarvestPlan
from megatron_eqlen.recipe import RewardRecipe
from megatron_eqlen.rewards.measured import scored
from megatron_eqlen.rewards.scoring import EarlyGrading, Scorer
from megatron_eqlen.tokens import Tokens
from megatron_eqlen.types import Delta, Grade, Part, Prompt, Rollout
from tests.kit import slow_graders
from tests.kit.evaluations import evaluated
from tests.kit.marks import examples
from tests.kit.processes import are_gone, descendants, within
from tests.kit.recipes import small
from tests.pure.test_ahead import world_of_one

__all__ = ["world_of_one"]

END = 0
OBEDIENT = "tests.kit.slow_graders:Obedient"


class Letters:
    """A tokenizer whose token ids are code points."""

    eos_token_ids = frozenset({END})

    def decode(self, token_ids):
        return "".join(chr(token) for token in token_ids if token != END)


class OneByOne:
    """An engine that ends the requests one after the other, each when ``may_end(number)`` is true."""

    max_model_len, max_num_seqs, vocab_size, policy_version = 200, 64, 0x110000, 0

    def __init__(self, texts, may_end) -> None:
        self.texts, self.may_end = texts, may_end
        self.requests: list[str] = []
        self.ended = 0

    def sample_as(self, rollout):
        pass

    def submit(self, request):
        self.requests.append(request.request_id)

    def step(self):
        if not within(30, lambda: self.may_end(self.ended)):
            raise AssertionError(f"nothing that completion {self.ended} may wait for happened")
        tokens = tokens_of(self.texts[self.ended])
        self.ended += 1
        return [Delta(self.requests[self.ended - 1], tokens, {"logprobs": [0.0] * len(tokens)}, "stop")]

    def abort(self, request_ids): ...

    def metrics(self):
        return {}


def tokens_of(text: str) -> list[int]:
    return [*map(ord, text), END]


def ending(text: str) -> Part:
    return Part(Tokens.of(tokens_of(text), [0.0] * len(tokens_of(text))), "stop")


def prompt(grader: str = OBEDIENT, name: str = "q#7") -> Prompt:
    return Prompt(name, [1], "?", grader, "right", "sums")


def group(*texts: str, grader: str = OBEDIENT) -> Rollout:
    return kit.group(prompt(grader), 0, [ending(text) for text in texts])


def verdicts(rollout: Rollout) -> list[tuple[str, float] | None]:
    return [seg.grade and (seg.grade.verdict, seg.grade.reward) for seg in rollout.parts]


@pytest.fixture
def begun(tmp_path, monkeypatch):
    """Return the items that graders have begun."""
    monkeypatch.setattr(slow_graders, "LOG", str(tmp_path / "log"))
    (tmp_path / "log").touch()
    return lambda: [line.split()[0] for line in (tmp_path / "log").read_text().splitlines()]


@pytest.fixture
def scorer(begun):
    scorer = Scorer(RewardRecipe(workers=1, step_timeout=2), Letters())
    yield scorer
    scorer.close()


@pytest.fixture
def recipe(tmp_path):
    (tmp_path / "test.parquet").write_bytes(b"")
    benchmarks = [{"name": "sums", "path": f"{tmp_path}/test.parquet"}]
    return small(
        group_size=3, data__max_prompt_length=8, sampling="independent", rollout={"max_response_length": 100},
        packing={"max_tokens_per_row": 128}, evaluation={"samples": 3, "benchmarks": benchmarks},
    )  # fmt: skip


def test_a_response_is_graded_while_others_are_generated(scorer, begun, recipe, tmp_path):
    """The second ends only after the grading of the first began, the third after that of the second; the
    grading of the third ends only after the harvest."""
    gate, after = tmp_path / "gate", tmp_path / "after"
    texts = ["wrong", f"right: wait {gate}", f"last: wait {after}"]

    def may_end(number: int) -> bool:
        if number == 2:
            gate.touch()
        return begun() == ["wrong", "right"][:number]

    plan = HarvestPlan([prompt()], recipe, {END}, seed=0)
    rollouts, _ = harvest(OneByOne(texts, may_end), plan, [EarlyGrading(scorer)])
    after.touch()
    metrics = scorer.score(rollouts, seconds=60.0)
    assert verdicts(rollouts[0]) == [("done", 0.0), ("done", 1.0), ("done", 0.0)]
    assert begun() == ["wrong", "right", "last"]
    assert metrics["reward/calls"] == 3
    assert metrics["reward/hidden_seconds"] >= rollouts[0].parts[0].grade.seconds > 0
    assert 0 < metrics["reward/wait_seconds"] <= metrics["reward/seconds"]


def test_an_evaluation_grades_while_it_generates(scorer, begun, recipe):
    engine = OneByOne(["a", "right", "b"], lambda number: begun() == ["a", "right"][:number])
    result = evaluated(recipe, engine, [prompt()], Letters(), scorer=scorer)
    assert result.answers[0].rewards == [0.0, 1.0, 0.0]


def test_a_rank_grades_only_what_it_was_given(scorer, begun, recipe):
    scorer.begin_ended([group("begun before")])
    rollout = group("right")
    assert scorer.score([rollout])["reward/calls"] == 1
    assert verdicts(rollout) == [("done", 1.0)]


def test_what_has_no_verdict_in_time_has_no_reward_and_is_said_once(scorer, begun, caplog):
    quick, stuck = group("right", "other"), group("right: loop", "behind", "right: loop")
    scorer.begin_ended([quick, stuck])
    assert within(30, lambda: len(begun()) == 3), "the only worker has answered the quick ones"
    scorer.score([quick, stuck], seconds=2.0)
    _, metrics = scored([quick, stuck], RewardRecipe())
    assert verdicts(quick) == [("done", 1.0), ("done", 0.0)]
    assert verdicts(stuck) == [("unscored", 0.0)] * 3
    assert (metrics["reward/unscored"], metrics["reward/dropped"], metrics["reward/ended"]) == (3, 3, 2)
    assert metrics["policy/reward"] == 0.5, "what has no reward is no 0"
    cause = "no verdict 2 s after the harvest (reward.step_timeout)"
    assert stuck.parts[0].grade == Grade.unscored(cause)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert f"3 of 5 responses have no reward: {cause} (q#7)" in caplog.text
    after = group("right")
    scorer.score([after])
    assert verdicts(after) == [("done", 1.0)], "the stuck program was killed"


@pytest.mark.parametrize(("text", "message"), [
    ("x: die", "Obedient: RuntimeError at .*: no verdict: the worker died"), ("x: refuse", "x is refused"),
])  # fmt: skip
def test_what_goes_wrong_in_the_background_is_raised_once_with_the_prompts_id(begun, text, message):
    scorer = Scorer(RewardRecipe(workers=1, on_error="end"), Letters())
    scorer.begin_ended([group("right", text)])
    for _ in "12":
        with pytest.raises(ValueError, match=message) as raised:
            scorer.score([group("right", text)])
        assert raised.value.__notes__ == ["while an answer to prompt q#7 was graded"]
    scorer.score([again := group("right")])
    assert verdicts(again) == [("done", 1.0)], "nothing is left of it"
    scorer.close()


def test_equal_responses_are_begun_once_and_recorded_grades_are_kept(scorer, begun):
    kept, first, other = Grade(0.25, "kept"), group("right", "x"), group("right", "x")
    first.parts[1].grade = kept
    scorer.begin_ended([first, other])
    scorer.begin_ended([other])
    assert scorer.score([first, other])["reward/calls"] == 2
    assert sorted(begun()) == ["right", "x"]
    assert first.parts[1].grade is kept
    assert verdicts(other) == [("done", 1.0), ("done", 0.0)]
    assert scorer.score([first, other])["reward/calls"] == 0


def test_closing_while_responses_are_graded_leaves_no_process(begun):
    before = descendants(os.getpid())
    scorer = Scorer(RewardRecipe(workers=2), Letters())
    scorer.begin_ended([group("a: loop", "b: loop", "c: loop")])
    assert within(30, lambda: len(begun()) == 2)
    started = descendants(os.getpid()) - before
    scorer.close()
    assert len(started) == 3
    assert within(20, are_gone(started))


CALLS: list[str] = []


class Plain:
    """A grader that can only grade."""

    def __init__(self, reward: RewardRecipe) -> None:
        CALLS.append(f"made for {reward.workers} workers")

    def grade(self, texts, golds):
        CALLS.append(",".join(texts))
        return [Grade(1.0, "scored") for _ in texts]

    def close(self): ...


JUDGE = f"{__name__}:judge"


def judge(question: str, response: str, gold: str) -> float:
    CALLS.append(response)
    return float("nan" if response == "too good" else 1)


def test_code_of_this_process_is_called_when_the_harvest_is_over(begun):
    CALLS.clear()
    scorer = Scorer(RewardRecipe(workers=3, on_error="end"), Letters())
    rollouts = [group("a", "b", grader=f"{__name__}:Plain"), group("c", grader=JUDGE)]
    scorer.begin_ended(rollouts)
    assert CALLS == ["made for 3 workers"]
    assert scorer.score(rollouts)["reward/calls"] == 3
    assert CALLS == ["made for 3 workers", "a,b", "c"]
    with pytest.raises(ValueError, match=r"expected a finite number as reward, got nan") as raised:
        scorer.score([group("too good", grader=JUDGE)])
    assert "q#7" in raised.value.__notes__[0]
    scorer.close()


@examples(30)
@given(
    texts=st.lists(st.sampled_from([r"\boxed{5}", r"\boxed{6}", "x</think>", "5", r"\boxed{5}</think>"])),
    early=st.lists(st.booleans(), min_size=5),
)
def test_grades_do_not_depend_on_when_grading_began(texts, early):
    prompts = [Prompt(f"q{n}", [1], "?", "math", "5") for n in range(len(texts))]
    at_once, in_parts = (
        [kit.group(q, 0, [ending(t)]) for q, t in zip(prompts, texts, strict=True)] for _ in "12"
    )
    scorer = Scorer(RewardRecipe(workers=1), Letters())
    scorer.score(at_once)
    scorer.begin_ended([rollout for rollout, now in zip(in_parts, early * len(texts), strict=False) if now])
    scorer.score(in_parts)
    scorer.close()
    assert in_parts == at_once
