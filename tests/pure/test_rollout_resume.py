"""A harvest that is killed, again and again, ends like one that was not: the scripted engine of
``test_rollout_harvest``, a real recorder, and a disk that stops at any batch."""

from __future__ import annotations

import contextlib
import json
import random
import re
import tempfile
import time
import zlib
from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

import tests.kit.rollouts as kit
from megatron_eqlen.environments.conversation import Conversations
from megatron_eqlen.environments.environment import Environment, Observation
from megatron_eqlen.environments.workspace import Workspace
from megatron_eqlen.harvest.harvest import harvest
from megatron_eqlen.harvest.harvest_plan import HarvestPlan
from megatron_eqlen.recipe import EnvironmentRecipe, Recipe
from megatron_eqlen.record import recorder as recorder_module
from megatron_eqlen.record.arrow_log import ArrowLog
from megatron_eqlen.record.partial import HarvestProgress
from megatron_eqlen.record.reader import read_progress, read_step, recorded_files, remove_open_tracks
from megatron_eqlen.record.recorder import OPEN_FILES, Recorder
from megatron_eqlen.tokens import Tokens
from megatron_eqlen.types import Metrics, Part, Prompt, Rollout
from tests.kit.marks import examples
from tests.kit.observers import OnPart
from tests.pure.test_rollout_harvest import (
    EOS,
    ScriptedEngine,
    check_routes,
    make_prompts,
    make_recipe,
    without,
)

PROMPTS = [replace(prompt, number=number) for number, prompt in enumerate(make_prompts(4))]
NAMES = [prompt.prompt_id for prompt in PROMPTS]


class Killed(Exception):
    pass


@dataclass
class Mortal(ScriptedEngine):
    """An engine that dies after that many steps."""

    life: int = 10**9
    masks: bool = True

    def _delta(self, name):
        delta = super()._delta(name)
        return delta if self.masks else without(delta, "kept")

    def step(self):
        self.age()
        return super().step()

    def age(self):
        self.life -= 1
        if self.life < 0:
            raise Killed


@dataclass
class Lockstep(Mortal):
    """Gives each request one token a step, so that a budget leaves the same rollouts in every run."""

    max_chunk: int = 1

    def step(self):
        self.age()
        return [self._delta(name) for name in list(self.requests)]


class Stopping:
    """A disk that takes that many batches and no more, as when the process is killed between two."""

    def __init__(self, batches: int) -> None:
        self.batches = batches

    def write(self, log: ArrowLog, batch) -> None:
        self.batches -= 1
        if self.batches >= 0:
            write(log, batch)


write = ArrowLog.write


def attempt(
    folder: Path, engine: Mortal, recipe: Recipe, seed: int, conversations: Conversations | None = None
) -> tuple[list[Rollout], Metrics, HarvestProgress]:
    files = recorded_files(folder)
    left = read_progress(folder, PROMPTS, recipe)
    announced = defaultdict(list)
    with Recorder(folder / "rank-0.arrow", recipe.rollout.unrecorded_columns) as recorder:
        rollouts, metrics = harvest(
            engine,
            HarvestPlan(PROMPTS, recipe, EOS, seed=seed, progress=left, conversations=conversations),
            [recorder, OnPart(lambda unit, part: announced[unit.prompt.prompt_id, unit.index].append(part))],
        )
    if not recipe.rollout.carry_over:
        remove_open_tracks(files, NAMES)
    for rollout in rollouts:
        if rollout.key not in [known.key for known in left.rollouts]:  # those that were recorded, too
            heard = sorted(announced[rollout.key], key=lambda part: part.number)
            assert heard == list(rollout.parts)
    return rollouts, metrics, left


cases = st.fixed_dictionaries(
    {
        "sampling": st.sampled_from(["equal_length", "independent", "tree"]),
        "seed": st.integers(0, 2**32 - 1),
        "end": st.sampled_from([0.02, 0.1, 0.3, 0.7]), "limit": st.integers(1, 24),
        "max_pairs": st.sampled_from([None, 1, 2]), "max_num_seqs": st.integers(1, 12),
        "masks": st.booleans(), "routes": st.booleans(), "version_tokens": st.sampled_from([None, 1, 5]),
        "budget": st.sampled_from([None, None, 10, 50, 90]), "carry_over": st.booleans(),
        "environment": st.sampled_from(["", "Dealer"]),
    }
)  # fmt: skip
kills = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 60), st.integers(0, 2**16)), max_size=4)


class Dealer(Environment):
    """Answers by a random generator, and by all messages so far."""

    def __init__(self, prompt: Prompt, seed: int) -> None:
        self.random, self.messages = random.Random(seed), ""

    def step(self, message: str) -> Observation:
        self.messages += message
        card = 20 + (zlib.crc32(self.messages.encode()) + self.random.randrange(100)) % 100
        return Observation(" ".join([str(card)] * self.random.randint(1, 3)), done=self.random.random() < 0.4)

    def grade(self) -> float:
        return zlib.crc32(self.messages.encode()) % 1000 / 1000


class Drawer(Workspace):
    """A workspace without commands: a copy draws numbers of its own, and a resumed run the same ones."""

    def __init__(self, prompt: Prompt, seed: int) -> None:
        self.seed, self.calls, self.drawn = seed, 0, ()

    def step(self, message: str) -> Observation:
        if zlib.crc32(f"{message}/{self.calls}".encode()) % 10 < 3:
            return Observation(done=True)
        self.drawn = (*self.drawn, self.draw())
        return Observation(str(20 + self.drawn[-1] % 100))

    def grade(self) -> float:
        return zlib.crc32(str(self.drawn).encode()) % 1000 / 1000

    def save(self, place: Path) -> str:
        return json.dumps([self.drawn, self.calls])

    def load(self, text: str, place: Path) -> None:
        drawn, self.calls = json.loads(text)
        self.drawn = tuple(drawn)


def environment_of(case: dict, folder: Path | None = None) -> Conversations | None:
    """Return the environment. With a budget, the harvest would depend on the time that calls take."""
    if not case["environment"] or case["budget"] is not None:
        return None
    return dealt() if case["environment"] == "Dealer" else dealt(Drawer, 40, folder)


def dealt(cls: type[Environment] = Dealer, max_turns: int = 4, folder: Path | None = None) -> Conversations:
    """Return conversations whose observations are token ids."""
    write = lambda observation: list(map(int, observation.content.split()))  # noqa: E731
    return Conversations(cls, str, write, EnvironmentRecipe(max_turns=max_turns), kept=folder)


def recipe_of(case: dict) -> Recipe:
    kind = {"sampling": case["sampling"]}
    if case["sampling"] == "tree":
        kind |= {"objective": "treerpo", "tree_sampling": {"branching": 2, "forks": 2}}
    return make_recipe(
        rollout={
            "max_response_length": case["limit"],
            "max_num_seqs": case["max_num_seqs"],
            "block_size": 1,
            "tokens_per_step": case["budget"],
            "keep_routes": case["routes"],
            "carry_over": case["carry_over"] and case["budget"] is not None,
        },
        loss={"rollout_is": "token"},
        equal_length={"max_pairs": case["max_pairs"]},
        **kind,
    )


def engine_of(case: dict, chaos: int, life: int = 10**9) -> Mortal:
    """Return the engine. With a budget, tokens must arrive in one order: the harvest depends on it."""
    given = {
        "max_num_seqs": case["max_num_seqs"], "life": life, "masks": case["masks"], "routes": case["routes"],
        "version_tokens": case["version_tokens"],
    }  # fmt: skip
    if case["budget"] is None:
        return Mortal(random.Random(chaos), case["end"], loss=0.05, **given)
    return Lockstep(random.Random(0), case["end"], **given)


@examples(20)
@given(cases, kills, st.sampled_from([0.0, 0.0, 0.0005]))
def test_killed_at_any_batch_and_any_step_a_harvest_ends_as_if_it_had_not_been(case, kills, interval):
    check_killed(case, kills, interval)


FORKED_AS_IT_ENDED = {
    "sampling": "tree", "seed": 7, "end": 0.1, "limit": 3, "max_pairs": None, "max_num_seqs": 1,
    "masks": False, "routes": False, "version_tokens": None,
}  # fmt: skip


@examples(25)
@example(FORKED_AS_IT_ENDED, [])
@given(cases, kills)
def test_copies_draw_the_same_numbers_again_after_a_kill(case, kills):
    check_killed(case | {"environment": "Drawer", "budget": None, "carry_over": False}, kills, 0.0)


def check_killed(case: dict, kills: list[tuple[int, int, int]], interval: float) -> None:
    recipe = recipe_of(case)
    plan = HarvestPlan(PROMPTS, recipe, EOS, seed=case["seed"], conversations=environment_of(case))
    want, _ = harvest(engine_of(case, 0), plan)
    with tempfile.TemporaryDirectory() as home, patch.object(recorder_module, "INTERVAL", interval):
        folder = Path(home) / "step-00000000"
        speak = environment_of(case, folder)
        for life, batches, chaos in kills:
            disk = Stopping(batches)
            with patch.object(ArrowLog, "write", lambda log, batch, disk=disk: disk.write(log, batch)):
                try:
                    attempt(folder, engine_of(case, chaos, life), recipe, case["seed"], speak)
                except Killed:
                    pass
                else:
                    if disk.batches < 0:  # it was not killed: no disk is like that
                        return
        found, _, _ = attempt(folder, engine_of(case, 99), recipe, case["seed"], speak)
        assert found == want
        assert read_step(folder) == want, "an environment's grades, too"
        for rollout in found:
            check_versions(rollout, case["version_tokens"])
            if case["routes"] and any(map(len, rollout.parts)):
                check_routes(rollout)
        # steps that carry over keep the files of killed attempts: complete rollouts come before their tracks
        assert not list(folder.glob(OPEN_FILES)) or case["carry_over"]


def test_a_track_of_many_turns_may_be_lost_in_each_of_them():
    recipe = make_recipe(rollout={"max_response_length": 60}, sampling="independent", objective="grpo")
    engine = ScriptedEngine(random.Random(0), end=0.1, loss=1.0, max_chunk=1)
    plan = HarvestPlan(PROMPTS, recipe, EOS, seed=0, conversations=dealt())
    rollouts, _ = harvest(engine, plan)
    lost = Counter(request.split(":")[0] for request in engine.losses.elements())
    assert max(lost.values()) > max(engine.losses.values()) == 3
    assert not any(rollout.unscored() for rollout in rollouts)


def test_a_grader_reads_the_last_turn():
    """Environments give the tokens from 20 on."""
    recipe = make_recipe(rollout={"max_response_length": 60}, sampling="independent", objective="grpo")
    plan = HarvestPlan(PROMPTS, recipe, EOS, seed=0, conversations=dealt())
    answered = 0
    for rollout in harvest(ScriptedEngine(random.Random(0)), plan)[0]:
        for part, response in rollout.ended():
            path = part.token_ids.tolist()
            begins = max((place for place, token in enumerate(path) if token >= 20), default=-1) + 1
            assert response.tolist() == path[begins:]
            answered += begins > 0
    assert answered


def test_tokens_that_a_probe_put_into_a_turn_are_of_the_response():
    table = Tokens.of([4, 20, 5, 6, 9], given=[(), (0,), (), (-1,), ()])
    (found,) = kit.group(PROMPTS[0], 0, [Part(table, "stop")]).ended()
    assert found[1].tolist() == [5, 6, 9]


def test_an_environment_that_takes_longer_than_an_engine_may_is_waited_for():
    """All tracks wait for it, so no token arrives meanwhile."""

    class Slow(Dealer):
        def step(self, message: str) -> Observation:
            time.sleep(0.4)
            return Observation(done=True)

    recipe = make_recipe(rollout={"request_timeout": 0.2}, sampling="independent", objective="grpo")
    plan = HarvestPlan(PROMPTS[:1], recipe, EOS, seed=0, conversations=dealt(Slow))
    rollouts, _ = harvest(ScriptedEngine(random.Random(0), end=0.5), plan)
    assert all(part.grade is not None for part, _ in rollouts[0].ended())


def check_versions(rollout: Rollout, version_tokens: int | None) -> None:
    """Check versions by the log-probs, which encode a token's place on its path, and so its weights."""
    for segment in rollout.parts:
        sampled = segment.tokens.is_generated
        places = np.rint(segment.tokens["logprobs"][sampled] * -7).astype(int)
        assert np.array_equal(segment.tokens["versions"][sampled], 3 + places // (version_tokens or 10**9))


@examples(15)
@given(cases, st.lists(st.integers(1, 15), min_size=1, max_size=3))
def test_no_token_that_was_recorded_is_generated_again_and_attempts_count_together(case, lives):
    """Also of a harvest that had ended, but not its step."""
    recipe, speak = recipe_of(case | {"budget": None}), dealt() if case["environment"] else None
    case = case | {"budget": 1}  # one token a step and nothing lost
    plan = HarvestPlan(PROMPTS, recipe, EOS, seed=case["seed"], conversations=speak)
    _, whole = harvest(engine_of(case, 0), plan)
    delivered = 0
    with tempfile.TemporaryDirectory() as home, patch.object(recorder_module, "INTERVAL", 0.0):
        folder = Path(home) / "step-00000000"
        for life in lives:
            killed = engine_of(case, 0, life)
            with contextlib.suppress(Killed):
                attempt(folder, killed, recipe, case["seed"], speak)
            delivered += sum(killed.delivered.values())
        _, rest, left = attempt(folder, engine_of(case, 0), recipe, case["seed"], speak)
    assert rest["harvest/resumed_tokens"] == left.generated_tokens == delivered
    assert rest["harvest/requests"] >= whole["harvest/requests"], "what was in flight is sent again"
    of_attempts = "resumed_tokens|requests|engine_steps|slot_occupancy|copies|replays|second|waited"
    for name in whole:
        assert re.search(of_attempts, name) or rest[name] == whole[name], name
