"""An environment that nobody has seen: whatever it does, the harvest ends, counts it, and is recorded."""

import sys
import threading
import time
from collections import Counter
from dataclasses import replace
from typing import ClassVar

import numpy as np
import pytest

from megatron_eqlen.environments.environment import Environment, Observation
from megatron_eqlen.environments.load import conversations, given_tokens
from megatron_eqlen.harvest.harvest import harvest
from megatron_eqlen.harvest.harvest_plan import HarvestPlan
from megatron_eqlen.recipe import EnvironmentRecipe
from megatron_eqlen.record.reader import read_step
from megatron_eqlen.record.recorder import Recorder, record_grades
from megatron_eqlen.types import Grade
from tests.kit.length_bias import QUESTION
from tests.pure.test_agents import FIRST, Speaking
from tests.pure.test_environments import TEMPLATES, tokenizer_with
from tests.pure.test_forks import recipe

TIMEOUT = 2.0
over = threading.Event()
"""Ends what hangs, after its test."""


def hangs():
    over.wait(60)


def fails():
    raise ConnectionError("no server")


def says(content, **more):
    return lambda: Observation(content, **more)


STEPS = {
    "is slow": lambda: time.sleep(0.1) or Observation("late"),
    "is too slow": lambda: over.wait(60) and Observation("late"),
    "is random": lambda: Observation(str(time.perf_counter_ns())),
    "says nothing": says(""),
    "says 50,000 tokens": says("7" * 50_000),
    "says NUL": says("a\0b"),
    "says a lone surrogate": says("a\ud800b"),
    "says bytes": says(b"a"),
    "says a number in messages": says("", messages=[{"role": "tool", "content": 7}]),
    "says a record as messages": says("", messages={"role": "tool", "content": "7"}),
    "says None": lambda: None,
    "raises": fails,
    "exits": sys.exit,
}
FORKS = {
    "hangs in fork": hangs, "raises in fork": fails, "exits in fork": sys.exit,
    "has None in fork": lambda: "None",
}  # fmt: skip
GRADES = {
    "is too slow to grade": hangs,
    "raises in grade": fails,
    "grades as NumPy does": lambda: np.array(0.5),
    "grades with odd text": lambda: Grade(0.5, "scored\0", "\ud800", "me", detail="\udcff"),
}
ENDS = {"hangs in close": hangs, "raises in close": fails, "closes twice": lambda: None, "makes": fails}

DROPPED = {
    "is too slow": f"no answer in {TIMEOUT:g} s",
    "says bytes": "content is a str",
    "says a number in messages": "TypeError",
    "says a record as messages": "messages are records",
    "says None": "found 'None'",
    "raises": "no server",
    "exits": "SystemExit",
    "is too slow to grade": f"no answer in {TIMEOUT:g} s",
    "raises in grade": "no server",
    "makes": "no server",
}
SAID = {"says nothing": "", "says NUL": "a\0b", "says a lone surrogate": "a?b", "is slow": "late"}


class Strange(Environment):
    """Does something strange for ``q1``, and ends responses after three turns."""

    made: ClassVar = Counter()

    def __init__(self, prompt, seed, how):
        self.how = how if prompt.prompt_id == "q1" else ""
        self.asked, self.key = 0, object()
        if self.how == "makes":
            fails()
        self.made[self.key] += 1

    def step(self, message):
        self.asked += 1
        if self.asked > 2:
            return Observation(done=np.True_)  # type: ignore[arg-type]
        return STEPS.get(self.how * (self.asked == 1), says("go on"))()

    def grade(self):
        return GRADES.get(self.how, lambda: 0.5)()

    def fork(self):
        if FORKS.get(self.how, bool)():
            return None
        other = type(self)(QUESTION, 0, "")
        other.how, other.asked = self.how, self.asked
        return other

    def close(self):
        self.made[self.key] -= 1
        ENDS.get(self.how, bool)()


class Uneven(Speaking):
    """Turns of unequal length, so that there are forks."""

    def submit(self, request):
        self.text = "hm\n</think>\n\n" + " I say" * (request.seed % 4)
        super().submit(request)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return tokenizer_with(tmp_path_factory.mktemp("tokenizer"), TEMPLATES["plain"])


@pytest.fixture(autouse=True)
def clean():
    over.clear()
    Strange.made.clear()
    yield
    over.set()


@pytest.mark.parametrize("sampling", ["equal_length", "independent"])
@pytest.mark.parametrize("how", [*STEPS, *FORKS, *GRADES, *ENDS])
def test_a_strange_environment_drops_its_rollout_at_most(tokenizer, tmp_path, caplog, how, sampling):
    objective = {"objective": "grpo"} if sampling == "independent" else {"pair_weight": "on_policy"}
    given = {"name": f"{__name__}:Strange", "options": {"how": how}, "max_given_tokens": 200}
    section = EnvironmentRecipe(timeout=TIMEOUT, **given)
    settings = recipe(sampling=sampling, limit=60, **objective).model_copy(update={"environment": section})
    asked = replace(QUESTION, token_ids=tokenizer.encode(tokenizer.render_chat(FIRST)))
    prompts = [replace(asked, prompt_id=f"q{n}", number=n) for n in range(3)]
    speak = conversations(settings, tokenizer)
    plan = HarvestPlan(prompts, settings, tokenizer.eos_token_ids, seed=0, conversations=speak)
    recorder = Recorder(tmp_path / "step-00000001" / "rank-0.arrow")
    began = time.monotonic()
    rollouts, metrics = harvest(Uneven(tokenizer, ""), plan, [recorder])
    recorder.close()
    assert time.monotonic() - began < 3 * TIMEOUT + 3
    scored = [rollout for rollout in rollouts if not rollout.unscored()]
    assert [rollout.prompt_id for rollout in scored] == ["q0", *["q1"] * (how not in DROPPED), "q2"]
    assert len(rollouts) == 3
    assert DROPPED.get(how, "") in caplog.text
    record_grades(recorder.path, rollouts)
    assert read_step(recorder.path.parent) == rollouts
    ended = [part for rollout in scored for part in rollout.parts if part.finish_reason == "stop"]
    assert {part.grade.reward for part in ended} == {0.5}
    text = "".join(tokenizer.backend.decode(part.token_ids) for part in rollouts[1].parts)
    assert f"tool\n{SAID.get(how, '')}" in text or how in DROPPED or how == "says 50,000 tokens"
    assert (metrics["environment/cut"] > 0) == (how == "says 50,000 tokens")
    if sampling == "equal_length":
        # after a fork that hung, none is copied; which fork comes first depends on the machine
        assert metrics["environment/copies"] > 0 or how == "hangs in fork"
        assert (metrics["environment/replays"] > 0) == (how in FORKS)
        assert ("Strange.fork: expected an Environment, found 'None'" in caplog.text) == (
            how == "has None in fork"
        )
    over.set()
    deadline = time.monotonic() + 5
    while set(Strange.made.values()) - {0} and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not set(Strange.made.values()) - {0}, "every environment is closed once"


@pytest.mark.parametrize("said", [
    Observation("7" * 5_000_000),
    Observation(messages=[{"role": "tool", "content": "7" * 5_000_000}]),
    Observation(messages=[{"role": "tool", "content": ""}] * 100_000),
    Observation(" " * 4000),
])  # fmt: skip
def test_of_what_an_environment_says_no_more_is_tokenized_than_the_policy_may_read(
    tokenizer, said, monkeypatch
):
    settings = recipe(sampling="independent", limit=60, objective="grpo")
    section = EnvironmentRecipe(name=f"{__name__}:Strange", options={"how": "raises"}, max_given_tokens=200)
    speak = conversations(settings.model_copy(update={"environment": section}), tokenizer)
    encoded, encode = [], tokenizer.backend.encode
    counted = lambda text, **how: encoded.append(text) or encode(text, **how)  # noqa: E731
    monkeypatch.setattr(tokenizer.backend, "encode", counted)
    assert len(speak.write(said)) > 200
    assert sum(map(len, encoded)) < 201 * max(tokenizer.longest, 60) + 200
    exact = Observation("7" * 150)
    assert len(speak.write(exact)) == len(given_tokens(tokenizer, exact)) <= 200


class Selling(Environment):
    """Changes its options, as a game changes its board."""

    def __init__(self, prompt, seed, stock: dict[str, int], shelf=()):
        self.stock, self.shelf = stock, shelf

    def step(self, message):
        self.stock["apples"] -= 1
        self.shelf.append(self.stock["apples"])


def test_each_environment_has_options_of_its_own(tokenizer):
    settings = recipe(sampling="independent", limit=60, objective="grpo")
    section = EnvironmentRecipe(name=f"{__name__}:Selling", options={"stock": {"apples": 5}, "shelf": []})
    speak = conversations(settings.model_copy(update={"environment": section}), tokenizer)
    for _ in range(2):
        made = speak.make(QUESTION, 0)
        made.step("an apple")
        assert (made.stock, made.shelf) == ({"apples": 4}, [4])
