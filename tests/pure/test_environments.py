"""Turns that an environment answers: exact forks, given tokens, failures, and resuming."""

import copy
import errno
import itertools
import json
import os
import re
import signal
import threading
import time
from collections import defaultdict
from contextlib import nullcontext
from dataclasses import replace
from functools import cache, partial
from types import SimpleNamespace
from typing import cast
from unittest.mock import MagicMock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from megatron_eqlen.engines.protocol import EngineError
from megatron_eqlen.environments import python_tool
from megatron_eqlen.environments.conversation import Conversations
from megatron_eqlen.environments.endpoint import as_message
from megatron_eqlen.environments.environment import Environment, Observation
from megatron_eqlen.environments.load import environment_class, given_tokens
from megatron_eqlen.environments.python_tool import PythonTool
from megatron_eqlen.environments.tool_calls import ToolEnvironment, _texts, spoken, tool, tool_calls
from megatron_eqlen.harvest.dialogues import Dialogues, _State
from megatron_eqlen.harvest.harvest import harvest, harvest_seed
from megatron_eqlen.harvest.harvest_plan import HarvestPlan
from megatron_eqlen.hf.tokenizer import load_tokenizer
from megatron_eqlen.hf.turns import SAID, require_end
from megatron_eqlen.job import Job
from megatron_eqlen.processes import distributed, events
from megatron_eqlen.recipe import EnvironmentRecipe
from megatron_eqlen.record.partial import HarvestProgress, PartialRollout, RolloutOrigin
from megatron_eqlen.run import loop
from megatron_eqlen.run.session import Session
from megatron_eqlen.sampling.harvester import Marker
from megatron_eqlen.sampling.track import Track
from megatron_eqlen.tokens import Tokens
from megatron_eqlen.types import Delta, Grade, Part
from recipes.examples.shop.shop import Shop
from recipes.examples.wordle.wordle import Wordle, marks
from recipes.passages import SearchTool
from tests.kit import ROOT
from tests.kit.length_bias import QUESTION, Drawing, every_outcome
from tests.kit.marks import examples
from tests.kit.processes import within
from tests.kit.rollouts import build_trees
from tests.kit.sentencepiece_maker import write_sentencepiece_tokenizer
from tests.pure.test_forks import recipe
from tests.pure.test_unscored import Mute
from tools.tokenizer_maker import SPECIAL_TOKENS, write_hf_tokenizer

END, CALL = 0, 1
COINS = (7, 8)
"""Tokens that the environment gives."""


@cache
def row(path):
    """Return the probabilities of the next generated token after a path."""
    logits = np.random.default_rng([4, *path]).normal(size=2) / 2
    return np.exp(logits) / np.exp(logits).sum()


@cache
def reward(turns, coins):
    return float(np.random.default_rng([5, *turns, 9, *coins]).random())


class Coins(Environment):
    """Answers a turn that calls by a coin; a turn of END alone ends the response. The reward depends on all
    turns and coins."""

    def __init__(self, prompt, seed, flips):
        super().__init__(prompt, seed)
        self.flips, self.coins, self.turns = flips, (), ()

    def step(self, message):
        self.turns += (len(message.split()),)
        if message.split()[0] == str(END):
            return Observation(done=True)
        self.coins += (self.flips(len(self.coins)),)
        return Observation(str(COINS[self.coins[-1]]))

    def grade(self):
        return reward(self.turns, self.coins)

    def fork(self):
        return copy.copy(self)  # flips belong to the world, and both copies see the same ones


class OwnCoins(Coins):
    """A copy draws later coins of its own."""

    def fork(self):
        other = copy.copy(self)
        other.flips = self.flips.independent(len(self.coins))
        return other


class Uncopied(Coins):
    def fork(self):
        raise TypeError("no copies")


class Reset(Coins):
    def fork(self):
        return type(self)(QUESTION, 0, self.flips)


class Flips:
    """Coins that all environments with the same ones see alike."""

    def __init__(self, choose, name, known=()):
        self.choose, self.name, self.known, self.copies = choose, name, list(known), 0

    def __call__(self, number):
        while len(self.known) <= number:
            self.known.append(self.choose((*self.name, len(self.known)), (0.5, 0.5)))
        return self.known[number]

    def independent(self, number):
        self.copies += 1
        return Flips(self.choose, (*self.name, "copy", number, self.copies), self.known[:number])


def speaking(make, **limits):
    """Return conversations of environments that ``make`` makes; a token is a word."""
    read = lambda ids: " ".join(map(str, ids.tolist()))  # noqa: E731
    write = lambda observation: list(map(int, observation.content.split()))  # noqa: E731
    return Conversations(make, read, write, EnvironmentRecipe(**{"workers": 1} | limits))


def harvested(settings, cls, choose):
    """Return the rollouts of one harvest. A coin is fair."""
    flips = {}

    def make(prompt, seed):
        return cls(prompt, seed, flips.setdefault(seed, Flips(choose, (seed,))))

    marker = Marker(lambda ids: CALL in ids, 1)
    plan = HarvestPlan([QUESTION], settings, [END], seed=0, marker=marker, conversations=speaking(make))
    return harvest(Drawing(choose, row), plan)[0]


def add_scores(total, path, generated, factors):
    for t in np.flatnonzero(generated):
        before = tuple(path[:t])
        total[before] = total[before] - factors[t] * row(before)
        total[before][path[t]] += factors[t]


def expected_step(settings, cls):
    total = defaultdict(lambda: np.zeros(2))
    for rollouts, probability in every_outcome(lambda choose: harvested(settings, cls, choose)):
        for tree in build_trees(rollouts, settings)[0]:
            paths = [()]
            for node in tree.nodes[1:]:
                above, ids = paths[node.parent], tuple(node.token_ids.tolist())
                paths.append(above + ids)
                generated = np.concatenate([np.zeros(len(above), bool), node.tokens.is_generated])
                factors = np.zeros(len(generated))
                factors[generated] = probability * node.weight * node.advantage
                add_scores(total, above + ids, generated, factors)
    return total


def gradient(limit):
    """Return the policy gradient: every response with every coin."""
    total = defaultdict(lambda: np.zeros(2))

    def walk(path, generated, turn, turns, coins, probability):
        if sum(generated) == limit:
            return  # truncated: reward 0
        for token in (END, CALL):
            after = (*path, token), (*generated, True), (*turn, token)
            p = probability * row(path)[token]
            if token != END:
                walk(*after, turns, coins, p)
            elif after[2][0] == END:
                value = reward((*turns, len(after[2])), coins)
                add_scores(total, after[0], np.array(after[1]), np.full(len(after[0]), p * value))
            else:
                for coin in (0, 1):
                    answered = (*after[0], COINS[coin]), (*after[1], False), ()
                    walk(*answered, (*turns, len(after[2])), (*coins, coin), p / 2)

    walk((), (), (), (), (), 1.0)
    return total


SETTINGS = {
    "pairs": (4, {"sampling": "equal_length", "pair_weight": "on_policy"}),
    "one pair": (4, {"sampling": "equal_length", "pair_weight": "on_policy", "max_pairs": 1}),
    "group": (4, {"sampling": "independent"}),
    "forks at a length": (3, {"rule": {"fork": "tokens", "step_tokens": 2, "forks": 1}}),
    "forks where lines end": (3, {"rule": {"fork": "death", "forks": 2}}),
    "forks after a marker": (3, {"rule": {"fork": "marker", "marker": "m", "forks": 1}}),
}


def error_of_the_step(name, cls):
    """Return the largest difference to the policy gradient."""
    limit, settings = SETTINGS[name]
    truth, step = gradient(limit), expected_step(recipe(limit=limit, **settings), cls)
    assert max(np.abs(values).max() for values in truth.values()) > 0.01
    return max(np.abs(step[path] - truth[path]).max() for path in {*step, *truth})


@pytest.mark.parametrize(
    ("name", "cls"),
    [*((name, Coins) for name in SETTINGS), ("group", OwnCoins), ("forks at a length", OwnCoins),
     ("forks at a length", Uncopied)],
)  # fmt: skip
def test_an_expected_step_is_the_policy_gradient_where_forks_copy_the_environment_or_tell_it_all(name, cls):
    assert error_of_the_step(name, cls) < 1e-12


def test_an_expected_step_is_not_the_policy_gradient_where_forks_reset_the_environment():
    assert error_of_the_step("forks at a length", Reset) > 1e-3


# ---- failures --------------------------------------------------------------------------------------------


class Answers(Environment):
    """Answers the first ``options`` turns."""

    def __init__(self, prompt, seed, most=1, fails=None):
        self.asked, self.most, self.fails = 0, most, fails
        self.prompt_id = prompt.prompt_id

    def step(self, message):
        self.asked += 1
        if self.fails is not None:
            self.fails(self.prompt_id)
        return Observation("7 7", done=self.asked > self.most)


def words(make, settings=None, count=3, kept=None, **limits):
    """Return rollouts and metrics of ``count`` prompts; a turn has two words. ``kept``: folder for states."""
    prompts = [replace(QUESTION, prompt_id=f"q{n}") for n in range(count)]
    settings = settings or recipe(limit=9, sampling="independent", objective="grpo")
    speak = replace(speaking(make, **limits), kept=kept)
    plan = HarvestPlan(prompts, settings, [END], seed=0, conversations=speak)
    alternating = iter([CALL, END] * 10_000)
    engine = Drawing(lambda name, shares: next(alternating), row)
    engine.step = lambda: [engine.next(name) for name in list(engine.paths)[:1]]
    return harvest(engine, plan)


@pytest.mark.parametrize(("method", "error", "told"), [
    ("step", ConnectionError("no server"), "ConnectionError: no server"),
    ("step", Mute(), "Mute: its message cannot be read (KeyError)"),
    ("save", ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"), "ConnectionResetError"),
], ids=["error", "mute", "save"])  # fmt: skip
def test_an_environment_that_fails_drops_its_rollout_and_no_other(method, error, told, tmp_path, caplog):
    """An error of a connection is an OSError, too, and no fault of the run's disk."""

    def fails(self, *arguments):
        if self.prompt_id == "q1":
            raise error
        return getattr(Answers, method)(self, *arguments)

    rollouts, _ = words(type("Failing", (Answers,), {method: fails}), kept=tmp_path / "step")
    assert [rollout.prompt_id for rollout in rollouts if not rollout.unscored()] == ["q0", "q2"]
    assert [len(rollout.unscored()) for rollout in rollouts] == [0, 2, 0]
    assert "q1/0 has a response without a reward, its environment failed: " + told in caplog.text


@pytest.mark.parametrize("number", [errno.ENOTDIR, errno.ENOSPC, errno.EDQUOT, errno.ESTALE])
def test_a_state_that_a_disk_does_not_take_ends_the_harvest_and_drops_no_rollout(tmp_path, number):
    """The run's own disk, or that of files which an environment saves itself. The same run resumes when there
    is room, with every response."""

    class Kept(Answers):
        def save(self, place):
            raise OSError(number, os.strerror(number))

    if number == errno.ENOTDIR:
        (tmp_path / "step").touch()  # below a file no folder can be made
    place = f"{tmp_path}/step/environments: " if number == errno.ENOTDIR else ""
    with pytest.raises(EngineError, match=f"state could not be saved: {place}{os.strerror(number)}"):
        words(Kept, kept=tmp_path / "step")


def test_an_environment_that_is_false_keeps_its_state():
    """A collection without items is."""

    class Empty(Answers):
        def __len__(self):
            return 0

    told, emptied = (words(cls)[0] for cls in (Answers, Empty))
    lengths = [[len(part) for rollout in each for part in rollout.parts] for each in (told, emptied)]
    assert lengths[0] == lengths[1]


WRONG = {
    "step: expected an Observation whose content is a str, .*found '7 7' of the type str": ("7 7", 0.0),
    "step: expected an Observation whose content is a str, .*found .*content=7": (Observation(7), 0.0),
    "step: expected an Observation whose .* done a bool, .*done='no'": (Observation("7", done="no"), 0.0),
    "step: expected an Observation whose .* or whose mess": (Observation("7", messages=[{"a": "b"}]), 0.0),
    "step: expected an Observation that the chat template writes as tokens, found ''": (Observation(""), 0.0),
    "grade: expected a finite number, a Grade or None, found '1.0' of the type str": (None, "1.0"),
    "grade: expected a finite number, a Grade or None, found 'nan' of the type float": (None, float("nan")),
    "grade: expected a finite number, a Grade or None, found '1000.*' of the type int": (None, 10**400),
}  # fmt: skip


@pytest.mark.parametrize("message", WRONG)
def test_what_is_no_answer_or_no_grade_is_named(message):
    answer, grade = WRONG[message]

    class Odd(Environment):
        def step(self, message):
            return answer or Observation(done=True)

        def grade(self):
            return grade

    rollouts, _ = words(Odd)
    details = {part.grade.detail for rollout in rollouts for part in rollout.parts}
    assert re.search(f"its environment failed: .*Odd.{message}", *details)


class Clock(Answers):
    """Cannot repeat its answers: it counts the seconds, so to speak."""

    clock = itertools.count(10)

    def step(self, message):
        return replace(super().step(message), content=str(next(self.clock)))


FORKING = recipe({"fork": "tokens", "step_tokens": 3, "forks": 1}, limit=9)


def test_a_fork_that_can_neither_be_copied_nor_told_the_messages_ends_the_harvest():
    """To leave it out would leave out the rollouts that fork."""

    class Holds(Clock):
        def __init__(self, *arguments):
            super().__init__(*arguments, most=2)
            self.lock = threading.Lock()  # which cannot be copied
            used.append(self)

        def close(self):
            used.remove(self)

    used: list[Holds] = []
    with pytest.raises(EngineError, match="copies = False; a new environment cannot be told the messages"):
        words(Holds, FORKING, count=1)
    assert not used


@pytest.mark.parametrize("fault", ["an environment", "the engine"])
def test_a_harvest_that_ends_with_an_error_gives_up_all_environments(fault):
    """Some have answered when the fault comes, and one is still being made."""
    closed, asked, ended = list[Environment](), threading.Event(), threading.Event()

    class Used(Answers):
        def __init__(self, prompt, seed):
            super().__init__(prompt, seed)
            if prompt.prompt_id == "q3":
                assert ended.wait(30)

        def step(self, message):
            assert asked.wait(30)
            if self.prompt_id == "q0" and fault == "an environment":
                raise ConnectionError("no server")
            return super().step(message)

        def close(self):
            closed.append(self)

    def step():
        if all(name.startswith("q4") for name in engine.paths):
            asked.set()
            time.sleep(0.2)  # in which those of three prompts answer
            if fault == "the engine":
                engine.abort = MagicMock(side_effect=EngineError("it is gone for good"))
                raise EngineError("it is gone")
        return [engine.next(name) for name in list(engine.paths)[:1]]

    prompts = [replace(QUESTION, prompt_id=f"q{n}") for n in range(5)]
    settings = recipe(limit=9, sampling="independent", objective="grpo")
    ends = settings.reward.model_copy(update={"on_error": "end"})
    settings = settings.model_copy(update={"reward": ends})
    plan = HarvestPlan(prompts, settings, [END], seed=0, conversations=speaking(Used, workers=10))
    alternating = iter([CALL, END] * 10_000)
    engine = Drawing(lambda name, shares: next(alternating), row)
    engine.step = step
    with pytest.raises(EngineError, match="it is gone" if fault == "the engine" else "no server"):
        harvest(engine, plan)
    assert within(30, lambda: len(closed) == 6), "two of each prompt have answered"
    ended.set()
    assert within(30, lambda: len(closed) == 8)


def test_a_call_that_waits_begins_where_the_one_before_it_ends_its_rollout():
    def fails(prompt_id):
        if prompt_id == "q0":
            time.sleep(0.3)  # until nothing is generated any more
            raise ConnectionError("no server")

    harvested = []
    make = lambda prompt, seed: Answers(prompt, seed, fails=fails)  # noqa: E731
    thread = threading.Thread(target=lambda: harvested.append(words(make, count=2)), daemon=True)
    thread.start()
    thread.join(60)
    (rollouts, _), *_ = harvested
    assert [bool([*rollout.unscored()]) for rollout in rollouts] == [True, False]


def test_environments_are_called_at_once_up_to_the_number_of_workers():
    together, running, most = threading.Barrier(3, timeout=60.0), [], []

    def meets(prompt_id):
        running.append(prompt_id)
        most.append(len(running))
        together.wait()
        running.remove(prompt_id)
        together.wait()

    make = lambda prompt, seed: Answers(prompt, seed, most=0, fails=meets)  # noqa: E731
    rollouts, metrics = words(make, workers=3)
    assert (len(rollouts), max(most)) == (3, 3)
    assert not any(rollout.unscored() for rollout in rollouts)
    assert metrics["environment/given_share"] == 0.0
    assert metrics["environment/seconds"] > 0


@pytest.mark.parametrize(("limits", "turns"), [({}, 3), ({"max_turns": 2}, 2), ({"max_given_tokens": 3}, 2)])
def test_limits_end_a_response_that_its_environment_would_answer(limits, turns):
    rollouts, metrics = words(lambda prompt, seed: Answers(prompt, seed, most=2), count=1, **limits)
    for part in rollouts[0].parts:
        assert part.finish_reason == "stop"
        assert len(part) == 2 * turns
        assert part.token_ids.tolist() == [CALL, END, *[7, 7, CALL, END] * (turns - 1)]
        assert part.tokens["given"].counts.tolist() == [0, 0, *[1, 1, 0, 0] * (turns - 1)]
    assert metrics["environment/cut"] == (2 if limits else 0)


def test_a_response_that_reaches_its_length_in_a_call_is_truncated():
    settings = recipe(limit=4, sampling="independent", objective="grpo")
    rollouts, _ = words(lambda prompt, seed: Answers(prompt, seed, most=9), settings, count=1)
    assert [(part.finish_reason, len(part)) for part in rollouts[0].parts] == [("length", 4)] * 2


def test_a_recorded_answer_stands_where_the_environment_cannot_repeat_it():
    """To drop the rollout, or to take the new answer, would leave out what was long: docs/agents.md has the
    numbers."""
    settings = recipe(limit=9, sampling="independent", objective="grpo")
    known = Tokens.of([CALL, END, 7], [0.0] * 3, versions=[0] * 3, given=[[], [], [0]])
    more = Tokens.of([CALL, END], [0.0] * 2, versions=[0] * 2, given=[[], []])
    tracks = {0: Tokens.joined([known, more]), 1: known}
    progress = HarvestProgress(partial=[PartialRollout(QUESTION, 0, tracks)])
    made = speaking(lambda prompt, seed: Clock(prompt, seed, most=3))
    plan = HarvestPlan([QUESTION], settings, [END], seed=0, progress=progress, conversations=made)
    (resumed,), metrics = harvest(Drawing(lambda name, shares: END, row), plan)
    assert all(part.token_ids.tolist()[:3] == [CALL, END, 7] for part in resumed.parts)
    assert metrics["environment/changed"] == 2
    assert not resumed.unscored()


def test_a_recorded_rollout_without_grades_gets_those_of_its_own_environment():
    """The environment of the step that began the rollout grades it again."""

    class Seeded(Answers):
        def __init__(self, prompt, seed):
            super().__init__(prompt, seed, most=0)
            self.seed = seed

        def grade(self):
            return self.seed % 997 / 997

    settings = recipe(limit=9, sampling="independent", objective="grpo")
    make, over = speaking(lambda prompt, seed: Seeded(prompt, seed), timeout=0.3), threading.Event()

    def graded(seed, progress):
        plan = HarvestPlan([QUESTION], settings, [END], seed=seed, progress=progress, conversations=make)
        return harvest(Drawing(lambda name, shares: END, row), plan)[0]

    (first,) = graded(harvest_seed(settings.seed, 3), HarvestProgress())
    known = [part.grade.reward for part in first.parts]
    for part in first.parts:
        part.grade = None
    begun = PartialRollout(QUESTION, 0, origin=RolloutOrigin(step=3))
    (again,) = graded(harvest_seed(settings.seed, 4), HarvestProgress([first], [begun]))
    assert [part.grade.reward for part in again.parts] == known
    again.parts[0].grade = Grade.unscored("its environment failed")
    (recorded,) = graded(harvest_seed(settings.seed, 4), HarvestProgress([again], [begun]))
    assert [part.grade.reward for part in recorded.parts] == known, "a recorded failure is asked again"
    again.parts[0].grade, Seeded.grade = None, lambda self: over.wait(60)
    (failed,) = graded(harvest_seed(settings.seed, 4), HarvestProgress([again], [begun]))  # generated again
    assert failed.unscored() == [*failed.parts]
    over.set()


# ---- recipes, templates, tools ---------------------------------------------------------------------------


class Fixed(Environment):
    copies = False

    def __init__(self, prompt, seed, size=1): ...

    def step(self, message):
        return Observation(done=True)


class Silent(Environment): ...


HERE = "tests.pure.test_environments"
REFUSED = {
    "expected a subclass of megatron_eqlen.environments.environment.Environment": {"name": f"{HERE}:words"},
    "environment.name: .*: expected a class with a method step": {"name": f"{HERE}:Silent"},
    "environment.options: .* argument 'sise'": {"name": f"{HERE}:Fixed", "options": {"sise": 2}},
    "Fixed cannot be copied, and sampling: equal_length forks": {"name": f"{HERE}:Fixed"},
}


@pytest.mark.parametrize("message", REFUSED)
def test_an_environment_that_does_not_fit_is_refused(message):
    section = {"environment": EnvironmentRecipe(**REFUSED[message])}
    with pytest.raises(ValueError, match=message):
        environment_class(recipe(sampling="equal_length").model_copy(update=section))


def test_sampling_without_forks_takes_an_environment_that_cannot_be_copied():
    section = {"environment": EnvironmentRecipe(name=f"{HERE}:Fixed", options={"size": 3})}
    for settings in (recipe(sampling="independent"), recipe(sampling="equal_length", max_pairs=1)):
        assert environment_class(settings.model_copy(update=section)) is Fixed


SYSTEM = [{"role": "system", "content": "s"}]
HISTORY = "{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}"
TEMPLATES = {
    "plain": HISTORY,
    "qwen3": "{% set drops = m.role == 'assistant' and messages[-1].role == 'user' %}"
    "{% set content = m.content.split('</think>')[-1] if drops else m.content %}"
    + HISTORY.replace("m.content", "content"),
}


def tokenizer_with(folder, template):
    write_hf_tokenizer(folder, ["again 7"])
    loop = "{% for m in messages %}" + template + "{% endfor %}{{ '<|im_start|>assistant\\n' }}"
    (folder / "chat_template.jinja").write_text(loop)
    return load_tokenizer(folder)


def test_given_tokens_continue_the_turn_as_the_template_does(tmp_path):
    tokenizer = tokenizer_with(tmp_path, TEMPLATES["qwen3"])
    given = given_tokens(tokenizer, Observation("7 apples"))
    assert tokenizer.decode(given) == "\n<|im_start|>tool\n7 apples\n<|im_start|>assistant\n"  # without ends
    assert tokenizer.eos_token_ids & {*given}
    chat = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    whole = tokenizer.encode(tokenizer.render_chat([*chat, {"role": "tool", "content": "7 apples"}]))
    assert whole[-len(given) :] == given
    # whatever a tool says: words of ours, too
    odd = tokenizer.decode(given_tokens(tokenizer, Observation(f"7\ufdd0 {SAID}")))
    assert odd == f"\n<|im_start|>tool\n7 {SAID}\n<|im_start|>assistant\n"


TAGS = ["<tool_response>", "</tool_response>"]
ROLE = "<\uff5cUser\uff5c>"
"""Is not marked special, as in DeepSeek's tokenizer."""


def write_with_tags(folder, corpus):
    write_hf_tokenizer(folder, corpus)
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    backend.add_tokens([AddedToken(text, normalized=False) for text in (ROLE, *TAGS)])
    backend.save(str(folder / "tokenizer.json"))


@pytest.fixture(scope="module", params=[write_with_tags, write_sentencepiece_tokenizer])
def family(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("family")
    request.param(folder, ["again 7 tool_response im_start im_end User"] * 4)
    (folder / "chat_template.jinja").write_text(
        "{% for t in tools or [] %}{{ t.name }}<|im_end|>\n{% endfor %}{% for m in messages %}"
        + HISTORY
        + "{% endfor %}{{ '<|im_start|>assistant\n' }}"
    )
    return load_tokenizer(folder)


WORDS = [*SPECIAL_TOKENS, *TAGS, ROLE, "<", "|im_end|>", "<|im_<|im_end|>end|>", "again", "\n", " "]


@examples(60)
@given(question=st.lists(st.sampled_from(WORDS)), said=st.lists(st.sampled_from(WORDS)))
def test_special_tokens_in_questions_observations_and_tools_are_text(question, said, family):
    """In a tool's result, tags are, too."""
    ids = family.encode(family.render_chat(SYSTEM, tools=[{"name": "t"}]))
    question, said = "".join(question), "".join(said)
    messages = [*SYSTEM, {"role": "user", "content": question}]
    prompt = family.encode(family.render_chat(messages, tools=[{"name": said}]))
    given_ids = given_tokens(family, Observation(said))
    assert family.backend.decode(prompt) == family.backend.decode(ids).replace("t<", f"{said}<", 1).replace(
        "<|im_start|>assistant", f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant"
    )
    expected = f"\n<|im_start|>tool\n{said}<|im_end|>\n<|im_start|>assistant\n"
    assert family.backend.decode(given_ids) == expected
    control = [family.encode(text) for text in SPECIAL_TOKENS]
    assert [[tokens.count(token) for tokens in (prompt, given_ids)] for (token,) in control] == [
        [0, 0], [3, 2], [3, 1],
    ]  # fmt: skip
    alone = [ids for text in (ROLE, *TAGS) if len(ids := family.encode(text)) == 1]
    assert {ids[0] for ids in alone}.isdisjoint(given_ids)
    assert len(alone) == 0 or alone[0][0] not in prompt


ENDS = {
    "ChatML": (HISTORY, "<|im_end|>", None),
    "an SFT of a base model": (HISTORY, "<|endoftext|>", "found '<|im_end|>"),
    "Falcon": ("{{ m.role + ': ' + m.content + '\n' }}", "<|im_end|>", None),
    "GLM": ("{{ '<|im_end|>' + m.role + '\n' + m.content }}", "<|im_end|>", None),
    "an end of the chat alone": (HISTORY + "{% if loop.last %}{{ '<|endoftext|>' }}{% endif %}",
                                 "<|endoftext|>", "found '<|im_end|>"),
    "no text": ("{{ '<|im_start|>' + m.role + '<|im_end|>' }}", "<|im_end|>", "a turn without its text"),
    "system alone": ("{{ raise_exception('system first') }}", "<|im_end|>", "refuses the roles user, assis"),
}  # fmt: skip


@pytest.mark.parametrize("name", ENDS)
def test_a_template_whose_turns_do_not_end_responses_is_refused(name, tmp_path):
    template, end, message = ENDS[name]
    tokenizer = tokenizer_with(tmp_path, template)
    (tmp_path / "chat_template.jinja").write_text("{% for m in messages %}" + template + "{% endfor %}")
    (end_id,) = tokenizer.encode(end)
    ends = {"eos_token_id": [end_id], "pad_token_id": end_id}
    (tmp_path / "generation_config.json").write_text(json.dumps(ends))
    with pytest.raises(ValueError, match=re.escape(message)) if message else nullcontext():
        require_end(load_tokenizer(tmp_path))


def test_a_template_that_reads_no_enable_thinking_is_refused_where_it_is_set(tmp_path):
    tokenizer = tokenizer_with(tmp_path, TEMPLATES["plain"])
    with pytest.raises(
        ValueError, match=r"data\.enable_thinking: false: expected a chat template that reads"
    ):
        require_end(tokenizer, enable_thinking=False)


LOST = {
    "no role tool": (HISTORY.join(("{% if m.role != 'tool' %}", "{% endif %}")), "out tool: content: '7 a"),
    "other text": (HISTORY.replace("m.content", "(m.content if m.role != 'tool' else '?')"), "leaves out"),
    "JSON": (HISTORY.replace("m.content", "(m.content if m.role != 'tool' else m.content | tojson)"), None),
    "a call before": (
        "{% if m.role == 'tool' and not messages[-2].tool_calls %}{{ raise_exception('no call') }}{% endif %}"
        + HISTORY.replace("m.content", "(m.tool_calls[0].function.arguments | string if m.tool_calls "
        "else m.content)"),
        None,
    ),
    "an answer behind a call alone": (  # Gemma 4's
        "{% set call = m.tool_calls[0].function.arguments | dictsort | string if m.tool_calls else '' %}"
        + HISTORY.replace("m.content", "(call or m.content)").join(
            ("{% if m.role != 'tool' or messages[-2].tool_calls %}", "{% endif %}")
        ),
        None,
    ),
    "a call that ends otherwise": (  # gpt-oss's, without <|call|> among the ends of sequence
        "{% if m.role == 'tool' and not messages[-2].tool_calls %}{{ raise_exception('no call') }}{% endif %}"
        "{% if m.tool_calls %}{{ m.tool_calls[0].function.arguments | string + '!' }}{% else %}"
        + HISTORY
        + "{% endif %}",
        "no call",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LOST)
def test_an_observation_that_the_template_loses_is_refused(name, tmp_path):
    template, message = LOST[name]
    tokenizer = tokenizer_with(tmp_path, template)
    with pytest.raises(ValueError, match=message) if message else nullcontext():
        given = given_tokens(tokenizer, Observation('7 apples "\u00e9"\n'))
        assert tokenizer.decode(given).startswith("\n<|im_start|>tool\n")


def test_an_observation_is_rendered_behind_the_calls_that_it_answers(tmp_path):
    """Gemma 4's has the tool's name, Kimi's the call's id, DeepSeek 3.2's ends with that of the last call."""
    template = (
        "{% if m.role == 'user' %}{{ '<|im_start|>user\n' + m.content + '<|im_end|>' }}"
        "{% elif m.role == 'tool' %}"
        "{{ (m.name or '?') + '/' + (m.tool_call_id or '?') + '=' + m.content }}"
        "{{ '/end' if loop.index == 2 + messages[1].tool_calls | length }}{% else %}"
        "{% for call in m.tool_calls or [] %}{{ call.function.arguments }}{% endfor %}"
        "{{ m.content + '<|im_end|>' }}{% endif %}"
    )
    tokenizer = tokenizer_with(tmp_path, template)
    several = [{"role": "tool", "content": "7", "name": "add"}, {"role": "user", "content": "so?"}]
    several.insert(1, {"role": "tool", "content": "8", "name": "now", "tool_call_id": "own"})
    for observation, said in (
        (Observation("7", keys={"name": "add"}), "add/functions.add:0=7/end"),
        (Observation(messages=several), "add/functions.add:0=7now/own=8/end<|im_start|>user\nso?"),
    ):
        assert tokenizer.decode(given_tokens(tokenizer, observation)) == f"{said}<|im_start|>assistant\n"


def test_a_template_that_changes_earlier_turns_is_refused(tmp_path):
    tokenizer = tokenizer_with(tmp_path, TEMPLATES["qwen3"])
    with pytest.raises(ValueError, match="turns as they are before a message of the role 'user'"):
        given_tokens(tokenizer, Observation("again", role="user"))


def cell(code):
    call = {"name": "python", "arguments": {"code": code}}
    return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"


def run_cell(tool, code):
    return tool.step(f"<think>\nlet me see\n</think>\n{cell(code)}").content


@pytest.mark.parametrize("code", ["'<think>'", "'<think>a</think>'", "'</think>'"])
def test_thoughts_in_a_calls_arguments_are_text(code):
    call = {"name": "python", "parameters": {"code": code}}
    for turn in (cell(code), f"<think>\nso\n</think>\n{cell(code)}", f"so {cell('x')}</think>{cell(code)}"):
        assert [found.arguments for found in tool_calls(turn)] == [{"code": code}]
    for before in ("", "<think>\nso\n</think>\n", "so</think>", "<|python_start|>so<|python_end|>"):
        assert [found.arguments for found in tool_calls(before + json.dumps(call))] == [{"code": code}]
    opened = f"{json.dumps(call)} so {{}}</think>{json.dumps(call)}"  # by the prompt
    assert [found.arguments for found in tool_calls(opened)] == [{"code": code}]
    message = as_message(f"<think>\nso\n</think>\nSee: {cell(code)}", 0, True)
    assert (message["reasoning_content"], message["content"]) == ("so", "See:")
    assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"code": code}
    assert [*tool_calls(f"<think>\nso\n</think>\n<think>{cell(code)}")] == []


def test_a_call_that_its_turn_cuts_off_may_hold_a_tag():
    (found,) = tool_calls(cell("'<think>'").removesuffix("\n</tool_call>"))
    assert found.arguments == {"code": "'<think>'"}


def test_a_turn_that_opens_calls_without_end_is_read_in_time():
    began = time.monotonic()
    assert spoken("<think>so\n") == ""
    for turn in ('<tool_call>\n{"name": "f"}\n' * 20_000, " " * 200_000):
        assert spoken(turn) == turn
        assert all("name" in text for text in _texts(turn))
    assert time.monotonic() - began < 5


def test_limits_of_the_python_tool_are_limits():
    for name, value in (("timeout", -1.0), ("timeout", 1e9), ("memory_mb", -5), ("longest_output", 0)):
        expected = "expected a number above 0, below 1e9"
        with pytest.raises(ValueError, match=rf"^environment.options.{name}: {expected}, found {value}$"):
            PythonTool.start(**{name: value})
    assert PythonTool(QUESTION, 0, longest_output=1)._short("xyz") == "\n... (3 characters)\n"


@pytest.fixture
def python():
    """Return a function that makes Python tools; their sandboxes end with the test."""
    yield partial(PythonTool, QUESTION, 0, sandbox="best_effort")
    PythonTool.end()


def test_the_python_tool_keeps_names_and_a_copy_has_its_own(python):
    tool = python(timeout=2.0, longest_output=100)
    assert run_cell(tool, "x = 3\nx + 1") == "4"
    copied = tool.fork()
    assert run_cell(tool, "x *= 5\nprint(x)") == "15"
    assert [run_cell(each, "x") for each in (tool, copied)] == ["15", "3"]
    assert tool.step(f"<think>\nor {cell('x = 9')}").done
    assert run_cell(tool, "y = 1 / 0") == "ZeroDivisionError: division by zero"
    assert run_cell(tool, "while True: pass") == "error: time limit"
    assert len(run_cell(tool, "print('a' * 999)")) < 140
    assert tool.step("<tool_call>{</tool_call>").content.startswith("error: the call is not JSON")
    assert "error: expected" in tool.step('<tool_call>{"name": "p", "arguments": {}}</tool_call>').content
    assert tool.step("It is \\boxed{15}.").done
    two = tool.step(cell("x") * 2).messages
    assert [message["content"] for message in two] == ["15", "error: more than 1 calls in a turn"]


def test_the_python_tool_shows_what_the_last_cell_prints_whatever_earlier_ones_did_to_the_output(python):
    tool = python()
    cells = (
        ("import os, sys, logging\nn = os.write(1, b'first')", "first"),
        ("sys.stdout.reconfigure(encoding='utf-8'); sys.stdout.buffer.write(b'raw\\n'); x = 5", "raw"),
        ("logging.basicConfig(stream=sys.stdout, level=20); out = sys.stdout; out.write('x')", "x1"),
        ("print('y', file=out); logging.info('seen'); x", "y\nINFO:root:seen\n5"),
        ("y = 6; os._exit(0)", "SystemExit: 0"),
        ("y", "6"),
    )
    assert [run_cell(tool, cell) for cell, _ in cells] == [shown for _, shown in cells]
    assert tool.step('{"answer": 5}').done, "braces are no call"
    assert tool.step('{"name": "python", "arguments": {"code": "x"}}').content == "5", "as Llama 3 writes it"


def test_the_python_tool_shows_errors_and_finds_names_where_modules_look_for_them(python):
    tool = python()
    cells = (
        ("import sys, traceback\ndef f():\n    '''>>> f()\n    2'''\n    return 1", "(no output)"),
        ("import doctest\ndoctest.testmod(report=False).failed", "1"),
        ("import timeit\ntimeit.timeit('f()', 'from __main__ import f', number=1) > 0", "True"),
        ("class A: pass\nimport pickle\ntype(pickle.loads(pickle.dumps(A()))) is A", "True"),
        ("try:\n    1 / 0\nexcept ZeroDivisionError:\n    traceback.print_exc()", "division by zero"),
        ("sys.stderr.close(); sys.stdout.close()", "(no output)"),
        ("print('said', file=sys.stderr)", "said"),
    )
    for code, shown in cells:
        assert run_cell(tool, code).endswith(shown), code


UNSTEADY = (
    # without the last bits: where in its heap an object lies may differ, where the heap lies may not
    "class A: pass\nprint([id(it) >> 20 for it in (object(), [], A, A(), A.__init__, lambda: A, print)])",
    "import random, uuid, secrets\nrandom.seed()\nprint(random.random(), random.Random().random())\n"
    "print(uuid.uuid4(), secrets.token_hex(4), random.SystemRandom().random())",
    "import os, tempfile\nprint(os.getpid(), os.urandom(4), os.getrandom(4))\n"
    "print(next(tempfile._get_candidate_names()))",
    "try:\n    import numpy as np\n    print(np.random.rand(), np.random.default_rng().random())\n"
    "except ImportError: pass",
)


def test_the_python_tool_answers_alike_in_every_process_and_after_other_cells(python):
    """Also where its sandboxes are killed: the cells run again."""

    def answers(before):
        PythonTool.end()
        for number in range(before):
            python().python(f"print('x' * {number * 3000})")
        tool = python()
        return [tool.python(cell) for cell in UNSTEADY]

    first = answers(0)
    assert first == answers(3)
    assert all("rror" not in answer for answer in first)
    tool = python()
    tool.python("n = 1")
    for sandbox in python_tool._pool("best_effort", "3.11").started:
        os.kill(sandbox._zygote, signal.SIGKILL)
    assert tool.python("n + 1") == "2"


def test_the_search_tool_finds_the_passages_that_fit_best(tmp_path):
    texts = ["Paris is the capital of France.", "Rome is the capital of Italy.", "Cats sleep. Cats eat."]
    records = [{"title": "Cities", "text": text} for text in texts[:2]] + [{"text": texts[2]}]
    (tmp_path / "index.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    tool = SearchTool(QUESTION, 0, index=str(tmp_path / "index.jsonl"), top_k=1)

    def found(query):
        call = json.dumps({"name": "search", "arguments": {"query": query}})
        return tool.step(f"<tool_call>{call}</tool_call>").content

    assert found("the capital of Italy") == f"Cities\n{texts[1]}"
    assert found("a cat, or cats?") == texts[2]
    assert found("dogs") == "(nothing found)"
    assert tool.step("Rome").done
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n{"txt": "b"}\n')
    with pytest.raises(ValueError, match=r"bad\.jsonl: record 2: expected"):
        SearchTool.start(index=str(tmp_path / "bad.jsonl"))
    with pytest.raises(ValueError, match="nowhere: expected a file, found none"):
        SearchTool.start(index="nowhere")


def called(shop, *calls):
    """Return what a turn with these calls, (tool, arguments) or texts, is answered."""
    dumped = lambda call: json.dumps({"name": call[0], "arguments": call[1]})  # noqa: E731
    texts = [call if isinstance(call, str) else dumped(call) for call in calls]
    answer = shop.step("".join(f"<tool_call>{text}</tool_call>" for text in texts))
    return [message["content"] for message in answer.messages] or answer.content


def test_methods_are_tools_whose_errors_the_policy_reads_and_a_copy_has_its_own_records():
    gold = {"orders": [{"number": n, "customer": 5, "status": s} for n, s in ((1, "open"), (2, "sent"))]}
    shop = Shop(replace(QUESTION, gold=json.dumps(gold | {"cancelled": [1]})), 0)
    number = {"type": "object", "properties": {"number": {"type": "integer"}}, "required": ["number"]}
    schema = {"name": "cancel", "description": "Cancel an order that is open.", "parameters": number}
    assert [tool["function"] for tool in Shop.tools][-1] == schema
    found = called(shop, ("find", {"customer": 5}), ("read", {"number": 2}))
    assert found == ["[1,2]", '{"number":2,"customer":5,"status":"sent"}']
    copied = shop.fork()
    refused = {
        "cancel: number: Field required; order: Extra inputs are not permitted": ("cancel", {"order": 1}),
        "expected the tool find or read or cancel, found 'step'": ("step", {"message": ""}),
        "order 2 is sent": ("cancel", {"number": 2}),
        "the call is not JSON, or not as": "[" * 100_000,
    }
    for message, call in refused.items():
        assert called(shop, call).startswith(f"error: {message}")
    assert called(shop, ("cancel", {"number": 1})) == "cancelled"
    assert [each.grade() for each in (shop, copied)] == [1.0, 0.0]
    assert shop.step("Done.").done


def test_a_tool_that_must_be_awaited_is_refused():
    with pytest.raises(TypeError, match=r"Late.find: expected a tool that returns its answer, found async"):

        class Late(ToolEnvironment):
            @tool
            async def find(self) -> str:
                """Find."""
                return "found"


def test_a_tool_may_be_static_and_its_arguments_have_names():
    class Still(ToolEnvironment):
        @staticmethod
        @tool
        def add(a: int, b: int = 2) -> int:
            return a + b

        @tool
        @classmethod
        def name(cls, mark: str) -> str:
            return cls.__name__ + mark

    assert [called(Still(QUESTION, 0), call) for call in (("add", {"a": 1}), ("name", {"mark": "!"}))] == [
        "3",
        "Still!",
    ]
    properties = [each["function"]["parameters"]["properties"].keys() for each in Still.tools]
    assert properties == [{"a", "b"}, {"mark"}]
    for method in (lambda self, *texts: "", lambda self, **texts: "", lambda self, text, /: ""):
        with pytest.raises(
            TypeError, match=r"<lambda>: expected a tool whose arguments have names, found .*text"
        ):
            type("Nameless", (ToolEnvironment,), {"find": tool(method)})


@pytest.mark.parametrize(("guess", "shown"), [
    ("crane", "GGGGG"), ("eerie", "--Y-G"), ("nacre", "YYYYG"), ("added", "Y--Y-"), ("pills", "-----"),
])  # fmt: skip
def test_wordle_marks_a_letter_as_often_as_the_word_has_it(guess, shown):
    game = Wordle(replace(QUESTION, gold="Crane"), 0)
    copied = game.fork()
    answer = game.step(f"<think>[hello]</think> I try [{guess}].")
    assert answer.done == (guess == "crane")
    assert answer.done or answer.content == f"{guess} {shown}"
    assert marks(guess, "crane") == shown
    assert (game.grade(), copied.grade(), copied.left) == (float(answer.done), 0.0, 6)


# ---- the page for authors --------------------------------------------------------------------------------


def test_the_environment_of_the_page_plays_and_its_copy_plays_on_alone():
    code = re.search(r"```python\n(.*?)```", (ROOT / "docs" / "agents.md").read_text(), re.DOTALL)
    names = {}
    exec(code[1], names)
    game = names["HigherLower"](replace(QUESTION, gold="100"), seed=3)
    assert game.step("hm").content == "Guess a number."
    low, high, copied = 1, 100, None
    while not (answer := game.step(f"I guess {(low + high) // 2}.")).done:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if answer.content == "higher" else (low, middle - 1)
        copied = copied or game.fork()
    assert game.grade() == 1.0
    assert (copied.grade(), copied.left, copied.number) == (0.0, 6, game.number)


def test_a_fork_gets_a_copy_of_the_environment_only_as_it_was_where_it_forks():
    """A line that is resumed may have been answered beyond the place of the fork; it may also have ended."""
    dialogues, prompt = Dialogues(speaking(Talker)), replace(QUESTION, prompt_id="p")
    line, fork = (Track(prompt, 0, number, [], 9, frozenset({END}), 0, parent=0) for number in (0, 1))
    line.takes_turns = True
    line.extend(Delta(line.name, [CALL, END], {"logprobs": [0.0] * 2}), 0)
    line.answer([7], 0)
    harvester = SimpleNamespace(key=("p", 0), line=lambda number: [Part(Tokens.of([]))])
    for answered, copies in ((1, 0), (0, 1)):
        dialogues._states["p", 0] = {0: _State(Talker(QUESTION, 0), line, answered)}
        dialogues.fork(harvester, [fork])
        assert dialogues.counts["copies"] == copies
        assert (1 in dialogues._states["p", 0]) == bool(copies)


class Talker(Environment):
    """Can be copied."""

    def fork(self):
        return Talker(QUESTION, 0)


@pytest.mark.parametrize("command", ["evaluate", "harvest"])
def test_a_later_command_has_the_date_of_the_first_start_in_templates(tmp_path, monkeypatch, command):
    tokenizer = tokenizer_with(tmp_path, HISTORY.replace("m.content", "strftime_now('%d %b %Y')"))
    events.append(tmp_path, "submitted")
    line = json.loads((tmp_path / events.FILE).read_text()) | {"time": 1e9}
    (tmp_path / events.FILE).write_text(json.dumps(line) + "\n")
    events.append(tmp_path, "step")
    for name in ("Hold", "keep_inputs", "dump", "write_text", "start_prompts", "leaderboard"):
        monkeypatch.setattr(loop, name, MagicMock())
    monkeypatch.setattr(loop, "evaluate_all", lambda *_: ((), {"time/evaluate": 1.0}))
    monkeypatch.setattr(distributed, "agree", lambda ask: ask())  # a rank alone
    monkeypatch.setattr(distributed, "is_rank0", lambda: True)
    session = SimpleNamespace(tokenizer=tokenizer, progress=MagicMock(), enter=MagicMock())
    session.keep_date = partial(Session.keep_date, session)
    monkeypatch.setattr(loop, "Session", lambda job: nullcontext(session))
    collected = MagicMock(rollouts=[])
    collected.name = "step-00000000"
    monkeypatch.setattr(loop, "Generator", lambda *_, **__: SimpleNamespace(collect=lambda step: collected))
    if command == "evaluate":
        loop.evaluate_only(cast(Job, None), tmp_path / "result.json", tmp_path)
    else:
        loop.harvest_only(MagicMock(**{"recipe.supervised": False}), tmp_path)
    assert "09 Sep 2001" in tokenizer.render_chat([{"role": "user", "content": "q"}])
