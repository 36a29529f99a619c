"""Harvests ahead of training: the real ``Ahead``, ``Generator``, harvest and recorder over the scripted
engine of ``test_rollout_harvest``, and a trainer that only counts versions."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from megatron_eqlen.engines.protocol import EngineError
from megatron_eqlen.job import Job
from megatron_eqlen.processes.timeline import Timeline
from megatron_eqlen.processes.watchdog import Watchdog
from megatron_eqlen.recipe import Recipe
from megatron_eqlen.run import evaluations, generation
from megatron_eqlen.run.ahead import Ahead
from megatron_eqlen.run.generation import Generator
from megatron_eqlen.run.replicas import Replicas
from megatron_eqlen.run.step import Step
from megatron_eqlen.types import Grade, Prompt, Rollout
from tests.pure.test_report_compare import result
from tests.pure.test_rollout_harvest import EOS, ScriptedEngine, make_recipe, versions_of, without

STEPS, PROMPTS = 5, 2


class Killed(Exception):
    pass


@dataclass
class Served(ScriptedEngine):
    """Servers whose weights are swapped by another thread; dies after ``life`` steps."""

    life: float = float("inf")
    busy: Any = field(default_factory=threading.RLock)
    closed: bool = False
    gate: threading.Event = field(default_factory=threading.Event)
    """Cleared: nothing is decoded."""

    def step(self):
        assert self.gate.wait(60)
        with self.busy:
            self.life -= 1
            if self.closed:
                raise EngineError("the engine was closed")
            if self.life < 0:
                raise Killed
            return [without(delta, "kept") for delta in super().step()]

    def update_weights(self, weights, policy_version):
        with self.busy:
            self.policy_version = policy_version

    def wake(self): ...

    def close(self):
        with self.busy:
            self.closed = True


@dataclass
class Counting:
    """A source of numbered prompts."""

    drawn: int = 0

    def next(self, count: int) -> list[Prompt]:
        self.drawn += count
        numbers = range(self.drawn - count, self.drawn)
        return [Prompt(f"p#{n}", [1, n % 7 + 1], "q", "math", "0", number=n) for n in numbers]

    def state_dict(self):
        return {"drawn": self.drawn, "sources": {}}

    def load_state_dict(self, state):
        self.drawn = state["drawn"]

    def close(self): ...


class Graders:
    causes: tuple[str, ...] = ()

    def begin(self, prompt, response): ...

    def begin_ended(self, rollouts): ...

    def score(self, rollouts, seconds=0.0):
        for segment in (segment for rollout in rollouts for segment, _ in rollout.ended()):
            segment.grade = Grade(len(segment) % 2, "scored")
        return {"reward/unscored": 0.0, "reward/ended": 1.0}


def session(recipe: Recipe) -> Any:
    timeline, ends = Timeline(), []

    @contextmanager
    def stage(name, patience=0.0):
        with timeline.span(name):
            seconds: dict[str, float] = {}
            yield seconds

    return SimpleNamespace(
        job=Job(recipe), recipe=recipe, replicas=Replicas(1, in_step=False), scorer=Graders(),
        tokenizer=SimpleNamespace(eos_token_ids=EOS), objective=SimpleNamespace(dynamic_sampling=False),
        stage=stage, timeline=timeline, watchdog=Watchdog(0, 1, None),
        ends_with=ends.append,
    )  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def world_of_one():
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def recipe(staleness: int, steps: int | None = STEPS, **rollout: Any) -> Recipe:
    engine = {"engine": "server", "servers": ["http://none"]}
    data = {"sources": [{"name": "s", "path": "none"}], "max_prompt_length": 8, "prompts_per_step": PROMPTS}
    limits = {"steps": steps} if steps else {"steps": None, "gpu_hours": 1}
    rollout = engine | {"staleness": staleness} | rollout
    return make_recipe(data=data, rollout=rollout, loss={"rollout_is": "token"}, **limits)


@contextmanager
def rollouts(engine: Served, streams: Path, staleness: int, steps=STEPS, **rollout: Any) -> Iterator[Any]:
    engine.gate.set()
    with opened(recipe(staleness, steps, **rollout), engine, streams) as source:
        try:
            yield source
        finally:
            engine.close()
            engine.gate.set()


@contextmanager
def opened(recipe: Recipe, engine: Any, streams: Path) -> Iterator[Any]:
    """Yield the rollouts of a run, until it ends."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generation, "start_engine", lambda *_, **__: engine)
        generator = Generator(session(recipe), streams, source=Counting())
    source = Ahead(generator) if recipe.rollout.staleness else generator
    try:
        yield source
    finally:
        engine.close()
        if isinstance(source, Ahead):
            source.close()


@dataclass
class Trained:
    """A step that is in the metrics: the weights that it trained and made, and the next data position."""

    before: int
    after: int
    position: Any
    rollouts: tuple[Rollout, ...]


ONE_EACH = itertools.repeat(1)


def train(source: Any, engine: Served, trained: dict, until: int, updates: Iterator[int] = ONE_EACH) -> None:
    """Train from the step after the newest of ``trained`` on, which has that many updates."""
    first = max(trained, default=-1) + 1
    version = trained[first - 1].after if trained else 0
    if trained:
        source.go_to(trained[first - 1].position)
    engine.update_weights(None, version)
    for number in range(first, until):
        step = source.collect(Step(number, version))
        after = version + next(updates)
        engine.update_weights(None, after)
        trained[number] = Trained(version, after, step.data_position, step.rollouts)
        version = after


def test_steps_are_harvested_while_earlier_ones_train_and_no_further_than_allowed(tmp_path):
    engine = Served(random.Random(0), policy_version=0)
    with rollouts(engine, tmp_path, 2, steps=None) as source:
        source.collect(Step(0, 0))
        last = source.under_way[-1].result(60)  # while step 0 trains
        assert [len(source.under_way), source.begun] == [2, 3]
        assert last.number == 2
        assert {version for rollout in last.rollouts for version in versions_of(rollout)} == {0}
        engine.update_weights(None, 1)
        second = source.collect(Step(1, 1))
        assert second.data_position["source"]["drawn"] == 2 * PROMPTS
        assert second.data_position["oldest"] == [(2, 0), (3, 1)]
        assert second.policy_version == 1, "which trains it"
    # in another process these steps have the ages that they had
    engine = Served(random.Random(0), policy_version=2)
    with rollouts(engine, tmp_path, 2, steps=None) as source:
        source.go_to(second.data_position)
        assert source.collect(Step(2, 2)).data_position["oldest"] == [(3, 1), (4, 2)]


def test_tokens_that_are_too_old_are_set_aside_and_sampled_anew(tmp_path, caplog):
    trained: dict[int, Trained] = {}
    engine = Served(random.Random(0), policy_version=0)
    with rollouts(engine, tmp_path, 1) as source:
        train(source, engine, trained, 2)
        source.under_way[-1].result(60)
    trained[1].position["oldest"] = [(2, 7)]  # in another life of the run step 1 was trained with version 7
    trained[1].after = 8
    engine = Served(random.Random(0), policy_version=0)
    with rollouts(engine, tmp_path, 1) as source:
        train(source, engine, trained, 3)
    assert (tmp_path / "stale-step-00000002").is_dir()
    assert {version for rollout in trained[2].rollouts for version in versions_of(rollout)} == {8}


def test_an_error_of_the_harvest_is_raised_where_the_step_is_taken(tmp_path):
    engine = Served(random.Random(0), policy_version=0)
    with rollouts(engine, tmp_path, 1) as source:
        source.collect(Step(0, 0))
        source.under_way[-1].result(60)
        engine.life = 0
        source.collect(Step(1, 0))
        with pytest.raises(Killed):
            source.collect(Step(2, 0))


def test_an_end_in_the_middle_of_a_harvest_leaves_its_tokens_on_disk(tmp_path, monkeypatch):
    monkeypatch.setattr("megatron_eqlen.record.recorder.INTERVAL", 0.0)
    engine = Served(random.Random(0), policy_version=0, max_chunk=1)
    with rollouts(engine, tmp_path, 1) as source:
        source.collect(Step(0, 0))
        source.under_way[-1].result(60)
        engine.life = 6
        source.collect(Step(1, 0))
        assert isinstance(source.under_way[-1].exception(60), Killed)
    (left,) = (tmp_path / "step-00000002").glob("open-*")
    assert left.stat().st_size > 0


def test_an_evaluation_has_the_engine_for_itself_and_its_time_has_no_harvest(tmp_path, monkeypatch):
    """The budget does not pay for ``time/evaluate``, so what generates the next steps is not in it."""
    engine, begun = Served(random.Random(0), policy_version=0), []
    with rollouts(engine, tmp_path, 2) as source:
        source.collect(Step(0, 0))
        alone = lambda *_: all(harvest.done() for harvest in source.under_way)  # noqa: E731
        measured = source.session.stage

        @contextmanager
        def stage(name, patience=0.0):
            begun.append((name, alone()))
            with measured(name, patience) as seconds:
                yield seconds

        asked = SimpleNamespace(
            **vars(source.session) | {"stage": stage, "progress": SimpleNamespace(say=print)}
        )
        monkeypatch.setattr(source, "benchmarks", [SimpleNamespace(name="b")])
        monkeypatch.setattr(source.generator, "evaluate", lambda *_: result(4))
        evaluations.evaluate_all(asked, source, tmp_path / "after.json", "after")
        assert ("evaluate", True) in begun
        assert len(source.under_way) == 2
