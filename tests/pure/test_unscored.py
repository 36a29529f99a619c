"""Responses without a reward: what ``reward.on_error`` makes of them, and what dropping them estimates."""

import time
from contextlib import nullcontext
from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import tests.kit.rollouts as kit
from megatron_eqlen.job import Job
from megatron_eqlen.objectives.build import weighted_units
from megatron_eqlen.objectives.dynamic_sampling import trained
from megatron_eqlen.processes.failures import PAUSES
from megatron_eqlen.recipe import Recipe, RewardRecipe
from megatron_eqlen.rewards import functions
from megatron_eqlen.rewards.measured import leave_out, refuse_too_many, scored
from megatron_eqlen.rewards.scoring import Scorer, UnscoredError, unscored_causes
from megatron_eqlen.run.rollouts import select
from megatron_eqlen.run.step import Batch, Step
from megatron_eqlen.sampling.comparison import ComparisonUnit
from megatron_eqlen.tokens import Tokens
from megatron_eqlen.types import Grade, Part, Rollout
from tests.kit.recipes import small
from tests.pure.test_rewards_background import Letters, ending, group, prompt

HERE = __name__


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    """Ask a service again at once."""
    monkeypatch.setattr(functions, "PAUSES", (0.0, 0.0))


class Mute(Exception):
    def __str__(self) -> str:
        raise KeyError("no message")

    __repr__ = __str__


def graded(response: str) -> float:
    if response.endswith("late"):
        raise TimeoutError("the judge does not answer")
    if response.endswith("mute"):
        raise Mute
    return float(response.endswith("right"))


asked: list[str] = []


def counted(response: str) -> float:
    asked.append(response)
    return 1.0 / (not response.endswith("!"))


class Batches:
    """A grader of its own that fails for a whole batch."""

    def __init__(self, reward: RewardRecipe) -> None: ...

    def grade(self, texts, golds):
        return [Grade(graded(text), "scored") for text in texts]

    def close(self): ...


def score(on_error: str, *texts: str, grader: str = f"{HERE}:graded"):
    scorer = Scorer(RewardRecipe(workers=1, on_error=on_error), Letters())
    rollout = group(*texts, grader=grader)
    scorer.score([rollout])
    scorer.close()
    return rollout, scored([rollout], RewardRecipe(on_error=on_error))[1], unscored_causes([rollout])


@pytest.mark.parametrize("grader", [f"{HERE}:graded", f"{HERE}:Batches"])
@pytest.mark.parametrize(("fails", "kind", "message"), [
    ("late", "TimeoutError", "the judge does not answer"),
    ("mute", "Mute", "its message cannot be read (KeyError)"),
])  # fmt: skip
def test_one_response_that_cannot_be_graded_takes_no_other_with_it(grader, fails, kind, message):
    rollout, metrics, causes = score("drop", "right", fails, "wrong", "right", grader=grader)
    verdicts = [part.grade.verdict for part in rollout.parts]
    assert verdicts == ["scored", "unscored", "scored", "scored"]
    assert (metrics["reward/unscored"], metrics["reward/dropped"], metrics["reward/ended"]) == (1, 1, 3)
    assert metrics["reward/mean"] == metrics["policy/reward"] == pytest.approx(2 / 3), "no 0 among them"
    assert metrics["reward/dropped_length"] == len("late") + 1
    assert metrics["policy/response_length"] == pytest.approx(np.mean([6, 6, 6]))
    assert causes[0].startswith(grader)
    assert f"{kind} at test_unscored.py" in causes[0]
    assert causes[0].endswith(f"{message} (q#7)")
    (kept,), _ = leave_out([rollout], RewardRecipe())
    assert [part.number for part in kept.parts] == [0, 2, 3]


def test_a_service_that_does_not_answer_is_asked_again_and_a_dead_one_costs_no_time(monkeypatch):
    pauses, left = [], [2]
    monkeypatch.setattr(functions, "PAUSES", PAUSES)
    monkeypatch.setattr("time.sleep", pauses.append)

    def judge(response: str) -> float:
        left[0] -= response.startswith("again")
        if response.startswith("again") and left[0] >= 0:
            raise ConnectionResetError("closed")
        return 1.0

    monkeypatch.setitem(globals(), "judge", judge)
    assert score("drop", "first", "again", "last", grader=f"{HERE}:judge")[1]["reward/unscored"] == 0
    assert pauses == [1.0, 2.0]
    left[0] = 99
    assert score("drop", "again", "again b", "again c", grader=f"{HERE}:judge")[1]["reward/unscored"] == 3
    assert pauses == [1.0, 2.0] * 2


def test_what_is_left_out_of_a_suspended_rollout_is_in_no_mean_and_counted_once():
    rollout, _, _ = score("drop", "right", "late", "wrong")
    ended, rollout.outcome = rollout.outcome, "suspended"
    first = leave_out([rollout], RewardRecipe())
    for part in rollout.parts:
        part.carried = True
    rollout.outcome = ended
    second = leave_out([rollout], RewardRecipe())
    left = [[part.grade.verdict for part in kept.parts] for (kept,), _ in (first, second)]
    assert left == [["scored"] * 2] * 2
    assert [counts["reward/unscored"] for _, counts in (first, second)] == [1, 0]
    assert [counts["reward/dropped"] for _, counts in (first, second)] == [0, 1]


def test_a_call_that_worked_is_not_made_again_for_one_that_fails():
    asked.clear()
    score("drop", "a", "b!", "c", "d!", grader=f"{HERE}:counted")
    assert asked == ["a", "b!", "c", "d!"]


def test_a_zero_is_counted_and_the_end_is_an_error():
    rollout, metrics, _ = score("zero", "right", "late")
    assert (metrics["reward/unscored"], metrics["reward/dropped"], metrics["reward/mean"]) == (1, 0, 0.5)
    assert metrics["reward/verdict/unscored"] == 0.5
    assert leave_out([rollout], RewardRecipe(on_error="zero"))[0] == [rollout]
    with pytest.raises(ValueError, match=r"TimeoutError at test_unscored\.py.*does not answer"):
        score("end", "right", "late")


def step_of(recipe: Recipe, *rollouts: Rollout) -> tuple[Step, list[ComparisonUnit]]:
    """Return a step of rollouts that the recipe's graders have graded, and its units."""
    scorer = Scorer(recipe.reward.model_copy(update={"workers": 1}), Letters())
    metrics = scorer.score(rollouts)
    scorer.close()
    job = Job(recipe)
    session: Any = SimpleNamespace(job=job, recipe=recipe, objective=job.objective)
    batch = select(Batch([*rollouts], metrics, None), Step(0, 0), session)
    assert [*trained(rollouts, job)] == batch.rollouts, "as pages show it"
    return Step(0, 0).add(batch), weighted_units(batch.rollouts, job)


@pytest.mark.parametrize(("on_error", "kept", "rewards"), [
    ("drop", ["some"], [1, 0, 1]), ("zero", ["some", "one"], [1, 0, 0, 1, 0, 0, 0, 1]),
])  # fmt: skip
def test_dynamic_sampling_asks_for_other_prompts_where_failures_leave_equal_rewards(on_error, kept, rewards):
    texts = {
        "some": ("right", "late", "wrong", "right"), "one": ("late", "late", "late", "right"),
        "none": ["late"] * 4,
    }  # fmt: skip
    recipe = small(
        objective="dapo", sampling="independent", group_size=4, data={"prompts_per_step": 3},
        reward={"on_error": on_error},
    )  # fmt: skip
    groups = [kit.group(prompt(f"{HERE}:graded", name), 0, [*map(ending, texts[name])]) for name in texts]
    step, units = step_of(recipe, *groups)
    assert [rollout.prompt_id for rollout in step.rollouts] == kept
    assert step.prompts == len(kept) < recipe.data.prompts_per_step, "others are drawn"
    assert step.metrics["reward/unscored"] == 8
    assert step.metrics["reward/dropped"] == 8 * (on_error == "drop")
    assert [reward for unit in units for reward in unit.rewards] == rewards
    weights = [node.weight * len(node) for unit in units for node in unit.nodes]
    assert sum(weights) == pytest.approx(1), "of what is kept"


def test_a_further_batch_of_prompts_fills_the_room_that_is_left_and_all_lines_may_be_compared():
    def of(name: str, *rewards: float) -> Rollout:
        responses = [ending("right") for _ in rewards]
        for part, reward in zip(responses, rewards, strict=True):
            part.grade = Grade(reward, "scored")
        return kit.group(prompt(f"{HERE}:graded", name), 0, responses)

    sizes = {"group_size": 2, "data": {"prompts_per_step": 2}, "rollout": {"top_k": 0, "top_p": 1.0}}
    job = Job(small(objective="dapo", sampling="independent", **sizes))
    session: Any = SimpleNamespace(job=job, recipe=job.recipe, objective=job.objective)
    step = Step(0, 0, rollouts=(of("first", 1, 0),))
    kept = select(Batch([of("second", 1, 0), of("third", 0, 1)], {}, None), step, session)
    assert [rollout.prompt_id for rollout in kept.rollouts] == ["second"]
    equal = select(Batch([of("equal", 1, 1)], {}, None), step, session)
    assert (equal.rollouts, len(equal.drawn)) == ([], 1)


@pytest.mark.parametrize(("on_error", "rewards"), [("drop", [[0, 1]]), ("zero", [[0, 1], [0, 1], [1, 0]])])
def test_a_stream_with_a_failure_is_left_out_as_a_whole_or_compared_with_zeros(on_error, rewards):
    recipe = small(objective="grpo", sampling="equal_length", group_size=4, reward={"on_error": on_error})
    begun, longer = (Part(Tokens.of([*map(ord, text)], [0.0] * len(text))) for text in ("so...", "so, so"))
    streams = [[(ending("bad!"), begun)], [(ending("late"), replace(begun)), (ending("right"), longer)]]
    tails = [ending("right"), ending("late")]
    rollouts = [
        kit.stream(prompt(f"{HERE}:graded"), index, 0, pairs, "tail_ended", tail)
        for index, (pairs, tail) in enumerate(zip(streams, tails, strict=True))
    ]
    step, units = step_of(recipe, *rollouts)
    assert step.metrics["reward/unscored"] == 2
    assert step.metrics["reward/dropped"] == 3 * (on_error == "drop")
    assert [unit.rewards for unit in units] == rewards
    assert sum(node.weight * len(node) for unit in units for node in unit.nodes) == pytest.approx(1)


@pytest.mark.parametrize(("unscored", "ended", "refused"), [
    (1, 0, False), (1, 3, False), (2, 18, False), (3, 18, True), (2, 0, True),
])  # fmt: skip
def test_more_than_the_limit_end_the_run_and_one_never_does(unscored, ended, refused):
    responses = [ending("right") for _ in range(ended + unscored)]
    for number, part in enumerate(responses):
        part.grade = Grade.unscored("the cause") if number < unscored else Grade(1.0, "scored")
    for on_error in ("drop", "zero"):
        rollout = kit.group(prompt(f"{HERE}:graded"), 0, responses)
        ends = pytest.raises(UnscoredError, match=f"{unscored} of {ended + unscored} .*: 0.1 .*the cause")
        with ends if refused else nullcontext():
            refuse_too_many([rollout], RewardRecipe(on_error=on_error))


def test_the_limit_is_a_share_of_all_responses_also_where_a_stream_is_left_out_as_a_whole():
    """5 of 60 are 8%, whatever their streams' other responses are."""
    pairs = [[(ending("right"), ending("right")) for _ in range(2)] for _ in range(15)]
    streams = [kit.stream(prompt(f"{HERE}:graded"), n, 0, two, "complete") for n, two in enumerate(pairs)]
    ended = [part for stream in streams for part in stream.parts]
    for number, part in enumerate(ended):
        part.grade = Grade.unscored("late") if number % 12 == 0 else Grade(1.0, "scored")
    refuse_too_many(streams, RewardRecipe(on_error="drop"))
    ended[1].grade = ended[2].grade = Grade.unscored("late")
    with pytest.raises(UnscoredError, match="7 of 60"):
        refuse_too_many(streams, RewardRecipe(on_error="drop"))
    for part in ended:
        part.carried = True  # an earlier step has counted them
    refuse_too_many(streams, RewardRecipe(on_error="drop"))


def slow(response: str) -> float:
    time.sleep(0.2)
    return 1.0


def test_no_reward_function_is_called_after_the_steps_time_for_graders():
    scorer = Scorer(RewardRecipe(workers=1, step_timeout=0.1), Letters())
    rollout = group("one", "two", "three", grader=f"{HERE}:slow")
    scorer.score([rollout], 0.1)
    assert [part.grade.verdict for part in rollout.parts] == ["scored", "unscored", "unscored"]
    assert "no verdict 0.1 s after the harvest (reward.step_timeout)" in unscored_causes([rollout])[0]


def test_the_expected_step_of_what_is_kept_is_the_gradient_of_the_reward_given_no_failure():
    """Enumerated: three responses of a softmax policy, rewards 1, 0, 3, no failure with 0.9, 0.5, 0.2; the
    rest of a group of three that has lost some, with the mean of the others as baseline."""
    logits, rewards, ok = np.array([0.3, -0.2, 0.1]), np.array([1.0, 0.0, 3.0]), np.array([0.9, 0.5, 0.2])
    policy = np.exp(logits) / np.exp(logits).sum()
    expected, weight = np.zeros(3), 0.0
    for drawn in product(range(3), repeat=3):
        for fine in product([True, False], repeat=3):
            chance = np.prod(
                [policy[n] * (ok[n] if good else 1 - ok[n]) for n, good in zip(drawn, fine, strict=True)]
            )
            kept = [n for n, good in zip(drawn, fine, strict=True) if good]
            if len(kept) < 2:
                continue
            weight += chance
            for place, n in enumerate(kept):
                others = kept[:place] + kept[place + 1 :]
                advantage = rewards[n] - rewards[others].mean()
                expected += chance * advantage * (np.eye(3)[n] - policy) / len(kept)
    given = policy * ok / (policy * ok).sum()
    gradient = given * (rewards - given @ rewards)  # of the mean of rewards under `given`, in the logits
    np.testing.assert_allclose(expected / weight, gradient, atol=1e-12)
