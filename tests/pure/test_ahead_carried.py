"""Harvests ahead of training, with suspended rollouts and without: whatever ends a run's lives (kills, STOP,
syncs and servers that fail, other numbers of servers), every unit is trained once and no token too late."""

from __future__ import annotations

import itertools
import random
import tempfile
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

from hypothesis import given
from hypothesis import strategies as st

from megatron_eqlen.engines.protocol import EngineError
from megatron_eqlen.files import step_name
from megatron_eqlen.harvest.harvest import harvest, harvest_seed
from megatron_eqlen.harvest.harvest_plan import HarvestPlan
from megatron_eqlen.objectives.units import due_rollouts
from megatron_eqlen.recipe import Recipe
from megatron_eqlen.record import recorder as recorder_module
from megatron_eqlen.record.reader import read_step
from megatron_eqlen.sampling.equal_length.dual_track import pairs_of
from megatron_eqlen.types import Delta, Rollout, RolloutKey
from tests.kit.marks import examples
from tests.pure import test_ahead as ahead
from tests.pure.test_ahead import Counting, Graders, Killed, Served, Trained, rollouts, train, world_of_one
from tests.pure.test_carry_over import content, lessons_of
from tests.pure.test_rollout_harvest import EOS, versions_of
from tests.pure.test_rollout_resume import Lockstep

__all__ = ["world_of_one"]

STEPS = 6


@dataclass
class Servers(Served):
    """Half of the servers die after ``death`` decode steps, with all their requests; so does every sync after
    the first ``syncs``."""

    death: float = float("inf")
    syncs: float = float("inf")
    loss: float = 0.1
    max_losses: int = 2

    def step(self) -> list[Delta]:
        self.death -= 1
        if self.death != 0:
            return super().step()
        with self.busy:
            lost = list(self.requests)[::2]
            self.abort(lost)
            self.max_num_seqs = max(self.max_num_seqs // 2, 1)
            return [Delta(name, [], {}, "lost") for name in lost]

    def update_weights(self, weights, policy_version):
        self.syncs -= 1
        if self.syncs < 0:
            raise EngineError("rollout.servers: none is alive")
        super().update_weights(weights, policy_version)


one_life = st.fixed_dictionaries({
    "life": st.integers(0, 60),  # decode steps until a kill
    "death": st.sampled_from([float("inf"), 1, 5, 20]),
    "syncs": st.integers(1, 8),
    "slots": st.sampled_from([3, 6, 12]),
    "stop": st.integers(1, STEPS),  # STOP after so many steps
    "back": st.integers(0, 2),  # trained steps without a checkpoint
})  # fmt: skip


@examples(12)
@given(
    seed=st.integers(0, 2**16), staleness=st.integers(0, 3), budget=st.sampled_from([None, 5, 15, 40]),
    max_staleness=st.sampled_from([1, 2, 100]), lives=st.lists(one_life, max_size=4), steady=st.booleans(),
    interval=st.sampled_from([0.0, 2.0]),
)  # fmt: skip
def test_every_unit_is_trained_once_and_in_time(
    seed, staleness, budget, max_staleness, lives, steady, interval
):
    """``steady``: each step has one update; otherwise one may be skipped, or a step have two. ``interval``:
    seconds until tokens are recorded. The script's tokens do not depend on the weights."""
    chaos, trained = random.Random(seed), dict[int, Trained]()
    updates = (1 if steady else chaos.choice([0, 1, 1, 2]) for _ in itertools.count())
    limits = {"carry_over": budget is not None, "tokens_per_step": budget, "max_staleness": max_staleness}
    with tempfile.TemporaryDirectory() as home, patch.object(recorder_module, "INTERVAL", interval):
        for life in [*lives, None]:
            settings = life or {"life": float("inf"), "slots": 6, "stop": STEPS, "back": 0}
            engine = Servers(chaos, policy_version=0, max_num_seqs=settings["slots"])
            engine.life = settings["life"]
            if life:
                engine.death, engine.syncs = life["death"], life["syncs"]
            with rollouts(engine, Path(home), staleness, STEPS, **limits) as source:
                try:
                    train(source, engine, trained, settings["stop"], updates)
                except (Killed, EngineError):
                    assert life is not None
            for number in sorted(trained)[len(trained) - settings["back"] :]:
                del trained[number]
        if steady:
            assert not list(Path(home).glob("stale-*")), "nothing that was harvested is thrown away"
        check(Path(home), trained, ahead.recipe(staleness, STEPS, **limits))


@dataclass
class Harvested:
    """Rollouts in a run's record."""

    drawn: dict[RolloutKey, int]
    """Steps that drew each rollout's prompt."""
    ended: dict[RolloutKey, Rollout]
    units: dict[RolloutKey, list]
    """All trained units."""


def check_record(streams: Path, trained: dict[int, Trained], recipe: Recipe) -> Harvested:
    """Assert that each rollout takes part where units are due, ends once, and is no older than allowed."""
    rollout, found = recipe.rollout, Harvested({}, {}, {})
    for number, step in sorted(trained.items()):
        recorded = read_step(streams / step_name(number))
        due = due_rollouts(recorded)
        assert [*map(content, step.rollouts)] == [*map(content, due)], "it was trained as recorded"
        for seen in recorded:
            key = seen.key
            assert key not in found.ended
            drawn = found.drawn.setdefault(key, number)
            assert number - drawn <= rollout.max_staleness - seen.suspended
            assert min(versions_of(seen)) >= trained[max(drawn - rollout.staleness, 0)].before
            if not seen.suspended:
                found.ended[key] = seen
        found.units |= lessons_of(recorded, recipe)
    prompts = {prompt_id for prompt_id, _ in found.drawn}
    assert prompts == {f"p#{n}" for n in range(len(prompts))}, "none is left out"
    assert len(found.drawn) == len(prompts) * recipe.streams_per_prompt
    return found


def check(streams: Path, trained: dict[int, Trained], recipe: Recipe) -> None:
    # as if all carried rollouts over: the weight of a rollout is the same in every step then
    recipe = recipe.model_copy(update={"rollout": recipe.rollout.model_copy(update={"carry_over": True})})
    found = check_record(streams, trained, recipe)
    drawn = {prompt_id: step for (prompt_id, _), step in found.drawn.items()}
    for whole in itertools.chain(*(uninterrupted(*prompt, recipe) for prompt in drawn.items())):
        key = whole.key
        if key not in found.ended:
            assert key not in found.units, "suspended at the end"
        elif (seen := found.ended[key]).outcome != "budget":
            assert content(seen) == content(whole)
            assert found.units[key] == lessons_of([whole], recipe)[key]
        else:
            assert [len(unit) for unit in found.units[key]] == [2] * len(pairs_of(seen))
            assert content(seen)[: 2 * len(pairs_of(seen))] == content(whole)[: 2 * len(pairs_of(seen))]


def uninterrupted(prompt_id: str, drawn: int, recipe: Recipe) -> list[Rollout]:
    """Return the graded rollouts of a prompt as one harvest without a budget makes them."""
    prompts = Counting(int(prompt_id[2:])).next(1)
    rollout = recipe.rollout.model_copy(update={"tokens_per_step": None, "carry_over": False})
    recipe = recipe.model_copy(update={"rollout": rollout})
    engine = Lockstep(random.Random(0), masks=False)
    found, _ = harvest(engine, HarvestPlan(prompts, recipe, EOS, seed=harvest_seed(recipe.seed, drawn)))
    Graders().score(found)
    return found
