"""Rollouts that a budget suspends, step after step, with kills and other numbers of replicas in between, end
and are trained as if nothing had interrupted them."""

from __future__ import annotations

import contextlib
import itertools
import json
import random
import re
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import tests.kit.rollouts as kit
from megatron_eqlen.environments.conversation import Conversations
from megatron_eqlen.environments.environment import Observation
from megatron_eqlen.files import step_name
from megatron_eqlen.harvest.harvest import harvest, harvest_seed
from megatron_eqlen.harvest.harvest_plan import HarvestPlan
from megatron_eqlen.job import Job
from megatron_eqlen.objectives.aggregation import AGGREGATIONS
from megatron_eqlen.objectives.build import weighted_units
from megatron_eqlen.objectives.units import due_rollouts
from megatron_eqlen.recipe import Recipe
from megatron_eqlen.record import recorder as recorder_module
from megatron_eqlen.record.partial import CarryOver, RolloutOrigin, open_prompts
from megatron_eqlen.record.reader import (
    PartialRolloutError,
    read_progress,
    read_step,
    recorded_files,
    remove_open_tracks,
)
from megatron_eqlen.record.recorder import OPEN_FILES, Recorder, record_grades
from megatron_eqlen.run.generation import Generator
from megatron_eqlen.run.step import Step
from megatron_eqlen.sampling.equal_length.dual_track import tail_of
from megatron_eqlen.sampling.harvester import Harvester
from megatron_eqlen.tokens import Tokens
from megatron_eqlen.types import Delta, Grade, Metrics, Part, Prompt, Rollout, RolloutKey, training_order
from tests.kit.marks import examples
from tests.kit.observers import OnPart
from tests.pure.test_rollout_harvest import EOS, check_routes, make_recipe, versions_of
from tests.pure.test_rollout_resume import Dealer, Killed, Lockstep, dealt

SAMPLINGS = {
    "equal_length": {},
    "independent": {"sampling": "independent"},
    "tree": {
        "sampling": "tree", "objective": "treerpo", "tree_sampling": {"branching": 2, "forks": 2},
    },
}  # fmt: skip


def prompts_of(step: int, count: int) -> list[Prompt]:
    return [Prompt(f"p#{step}.{i}", [1, i], "q", "math", "0", number=10 * step + i) for i in range(count)]


def reward_of(response: Sequence[int]) -> float:
    return (0.0, 0.5, 1.0)[sum(map(int, response)) % 3]


@dataclass
class Run:
    """Steps of generation and scoring, as ``Generator`` takes them, without ranks."""

    streams: Path
    recipe: Recipe
    end: float
    conversations: Conversations | None = None
    suspended: dict[RolloutKey, RolloutOrigin] = field(default_factory=dict)
    drawn: dict[str, tuple[int, Prompt]] = field(default_factory=dict)
    graded: Counter = field(default_factory=Counter)
    metrics: list[Metrics] = field(default_factory=list)
    """Metrics of each harvest that ended."""
    engine: Lockstep | None = None
    """Engine to use instead of a new one for each harvest."""
    held: Counter = field(default_factory=Counter)
    """Tokens of each track, and final parts of each rollout, that the newest attempt resumed."""

    def step(
        self, number: int, new: list[Prompt], budget: int | None, replicas: int = 1, kills: Sequence[int] = ()
    ) -> list[Rollout]:
        """Run a step; return its scored rollouts, suspended ones included."""
        carried, self.suspended = self.suspended, {}
        self.drawn |= {prompt.prompt_id: (number, prompt) for prompt in new}
        prompts = [self.drawn[name][1] for name in dict.fromkeys(key[0] for key in carried)] + new
        folder = self.streams / step_name(number)
        found: list[Rollout] = []
        for rank in range(replicas):
            for life in (*kills, None):
                with contextlib.suppress(Killed):
                    mine = self.attempt(folder, number, rank, prompts[rank::replicas], carried, budget, life)
                    break
            for rollout in mine:
                self.grade(rollout)
                self.teach(rollout)
            record_grades(folder / f"rank-{rank}.arrow", mine)
            found += mine
        self.suspended = {
            rollout.key: carried.get(rollout.key, RolloutOrigin(number))
            for rollout in found
            if rollout.suspended
        }
        found.sort(key=training_order)
        # rollouts that have not begun have no tracks, and their file may go
        assert self.suspended or not list(folder.glob(OPEN_FILES))
        assert read_step(folder) == found, "a replay trains the same"
        return found

    def attempt(self, folder, number, rank, prompts, carried, budget, life) -> list[Rollout]:
        asked = {prompt.prompt_id for prompt in prompts}
        files = recorded_files(folder)
        mine = {key: drawn for key, drawn in carried.items() if key[0] in asked}
        progress = read_progress(folder, prompts, self.recipe, mine)
        ended = {rollout.key for rollout in progress.rollouts}  # in this step, in an earlier attempt
        for partial in (each for each in progress.partial if each.key not in ended):
            held = {(partial.key, number): len(tokens) for number, tokens in partial.tracks.items()}
            held[partial.key, "parts"] = len(partial.final)
            lost = [
                key for key, count in self.held.items() if key[0] == partial.key and held.get(key, 0) < count
            ]
            assert not lost, "what was recorded is resumed from then on"
            self.held |= held
        rollout = self.recipe.rollout.model_copy(update={"tokens_per_step": budget})
        engine = Lockstep(
            random.Random(0), self.end, max_num_seqs=5, policy_version=number,
            life=10**9 if life is None else life, routes=self.recipe.rollout.keep_routes,
        )  # fmt: skip
        with Recorder(folder / f"rank-{rank}.arrow") as recorder:
            if self.engine is not None:
                self.engine.life, self.engine.policy_version = engine.life, number
                engine = self.engine
            recipe, seed = self.recipe.model_copy(update={"rollout": rollout}), self.recipe.seed
            plan = HarvestPlan(
                prompts, recipe, EOS, seed=harvest_seed(seed, number), progress=progress,
                conversations=self.conversations,
            )  # fmt: skip
            rollouts, metrics = harvest(engine, plan, [recorder, OnPart(check_is_new)])
        self.metrics.append(metrics)
        if not any(rollout.suspended for rollout in rollouts):
            remove_open_tracks(files, asked)
        if not files:  # an engine that died had delivered more
            generated = read_progress(folder, prompts, self.recipe, mine).generated_tokens
            assert generated == metrics["harvest/generated_tokens"]
            if self.engine is None and self.conversations is None:  # it counts one request of a track
                assert generated == sum(engine.delivered.values())
        return rollouts

    def grade(self, rollout: Rollout) -> None:
        for part, response in rollout.ended():
            if part.grade is None:
                self.graded[rollout.key, part.number] += 1
                part.grade = Grade(reward_of(response), "wrong")

    def teach(self, rollout: Rollout) -> None:
        """Fill the column ``teacher`` where it is missing, as a server does."""
        for part in rollout.parts if self.recipe.teacher else ():
            if "teacher" not in part.tokens:
                self.graded[rollout.key, part.number, "teacher"] += 1
                part.tokens = part.tokens.with_column("teacher", taught(rollout, part))

    def whole(self, prompt_id: str) -> list[Rollout]:
        """Return the rollouts of a prompt as one harvest without a budget makes them, graded."""
        number, prompt = self.drawn[prompt_id]
        rollout = self.recipe.rollout.model_copy(update={"tokens_per_step": None, "carry_over": False})
        recipe = self.recipe.model_copy(update={"rollout": rollout})
        engine = Lockstep(random.Random(0), self.end, max_num_seqs=5, routes=recipe.rollout.keep_routes)
        seed = harvest_seed(recipe.seed, number)
        plan = HarvestPlan([prompt], recipe, EOS, seed=seed, conversations=self.conversations)
        rollouts, _ = harvest(engine, plan)
        for graded in rollouts:
            for segment, response in graded.ended():
                segment.grade = segment.grade or Grade(reward_of(response), "wrong")
        return rollouts


def check_is_new(harvester: Harvester, part: Part) -> None:
    assert not part.carried, "an earlier step graded it"


def taught(rollout: Rollout, part: Part) -> np.ndarray:
    """Return [len(part.tokens)] numbers, each of which depends on its token's path."""
    path = np.concatenate([above.token_ids for above in rollout.line(part.number)])
    return np.cumsum(path, dtype=np.float32)[len(path) - len(part.tokens) :]


def content(rollout: Rollout) -> list:
    return [(p.role, p.number, p.parent, p.token_ids.tolist(), p.finish_reason) for p in rollout.parts]


def lessons_of(rollouts: Sequence[Rollout], recipe: Recipe) -> dict[RolloutKey, list]:
    """Return tokens, reward, advantage and weight of each member of each unit of the rollouts that a step
    trains."""
    rollouts = due_rollouts(rollouts)
    owner = {id(part): rollout.key for rollout in rollouts for part in rollout.parts}
    found: dict[RolloutKey, list] = {rollout.key: [] for rollout in rollouts}
    for unit in weighted_units(rollouts, Job(recipe)):
        of_members = zip(unit.members, unit.rewards, unit.nodes, strict=True)
        found[owner[id(unit.members[0])]].append(
            [
                (m.token_ids.tolist(), m.tokens["logprobs"].tolist(), r, node.advantage, node.weight)
                for m, r, node in of_members
            ]
        )
    return found


RATIOS = {"token-mean", "prompt-mean-token-mean"}
"""Averages whose denominator is a number of tokens of several rollouts."""

cases = st.fixed_dictionaries(
    dict.fromkeys(("on_policy", "routes", "teacher", "environment"), st.booleans())
    | {
        "kind": st.sampled_from(list(SAMPLINGS)),
        "suffix_reward": st.sampled_from(["max", "max", "mean"]),
        "unfinished": st.sampled_from(["zero", "drop"]),
        "max_pairs": st.sampled_from([None, None, 2]),
        "average": st.sampled_from([None, *AGGREGATIONS.keys() - RATIOS]),
        "minibatches": st.integers(1, 2),
        "overlong": st.sampled_from([0, 8]),
        "seed": st.integers(0, 2**32 - 1),
        "end": st.sampled_from([0.05, 0.15, 0.4]),
        "limit": st.integers(4, 24),
    }
)
steps = st.lists(
    st.tuples(
        st.integers(0, 3),  # new prompts
        st.sampled_from([5, 20, 60]),  # budget of a replica
        st.integers(1, 3),  # replicas
        st.lists(st.integers(0, 12), max_size=2),  # decode steps until a kill
    ),
    min_size=1,
    max_size=4,
)


def recipe_of(case: dict, **rollout) -> Recipe:
    limits = {"max_response_length": case["limit"], "max_staleness": 1000, "keep_routes": case["routes"]}
    masks = {"keep_sampling_mask": True, "top_k": 5}
    pairs = {name: case[name] for name in ("suffix_reward", "unfinished", "max_pairs")}
    average = case["average"]
    if case["kind"] == "equal_length" and case["on_policy"]:
        pairs, average = {"pair_weight": "on_policy", "max_pairs": case["max_pairs"]}, None
    loss = {"rollout_is": "token", "loss_agg_mode": average, "minibatches": case["minibatches"]}
    return make_recipe(
        seed=case["seed"], equal_length=pairs, teacher={"path": "t" if case["teacher"] else ""},
        rollout={"carry_over": True, "tokens_per_step": 1} | masks | limits | rollout,
        loss=loss | {"overlong_buffer": min(case["overlong"], case["limit"] - 1)}, **SAMPLINGS[case["kind"]],
    )  # fmt: skip


SIMPLE = {
    "kind": "equal_length", "suffix_reward": "max", "unfinished": "zero", "max_pairs": None, "overlong": 0,
    "seed": 1, "limit": 24, "routes": False, "on_policy": False, "average": None, "minibatches": 1,
    "teacher": False, "environment": False,
}  # fmt: skip


@examples(16)
@example(  # in the second step the environment has not repeated, when the budget ends, what tracks follow
    SIMPLE | {"seed": 17, "limit": 20, "end": 0.15, "environment": True},
    [(1, 20, 1, []), (1, 5, 1, []), (2, 60, 1, [])],
    0.0,
)
@example(SIMPLE | {"seed": 20, "limit": 4, "end": 0.4}, [(3, 20, 2, [])], 0.0)  # all of the suspended waited
@given(cases, steps, st.sampled_from([0.0, 0.0005]))
def test_every_rollout_is_trained_once_with_the_rewards_and_weights_of_a_step_that_trains_all_at_once(
    case, steps, interval
):
    check_trained_once(case, steps, interval)


class Slow(Dealer):
    """Has not repeated, when a small budget ends, what tracks follow."""

    seconds = 0.02

    def step(self, message: str) -> Observation:
        time.sleep(self.seconds)
        return super().step(message)


def test_parts_that_follow_an_answer_are_not_lost_where_the_environment_is_slow():
    case = SIMPLE | {"seed": 241, "limit": 10, "end": 0.05, "teacher": True, "environment": True}
    check_trained_once(case, [(1, 20, 1, []), (0, 5, 1, []), (1, 5, 1, [])], 0.0, Slow)


class UntilForked(Lockstep):
    """Dies when the third track of a rollout has tokens."""

    def age(self):
        if any(re.search("/2(:|$)", name) and count > 1 for name, count in self.delivered.items()):
            raise Killed


def test_forks_that_follow_an_answer_are_not_lost_where_the_budget_ends_before_it_is_repeated(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(recorder_module, "INTERVAL", 0.0)
    monkeypatch.setattr(Slow, "seconds", 0.0)
    run, prompts = Run(tmp_path, recipe_of(SIMPLE), 0.1, dealt(Slow)), prompts_of(0, 1)
    run.engine = UntilForked(random.Random(0), 0.1)
    with pytest.raises(Killed):
        run.attempt(tmp_path / step_name(0), 0, 0, prompts, {}, 1000, None)
    left = read_progress(tmp_path / step_name(0), prompts, run.recipe)
    assert any(2 in partial.tracks for partial in left.partial)
    run.engine, carried = Lockstep(random.Random(0), 0.1), {}
    monkeypatch.setattr(Slow, "seconds", 0.05)
    for number, budget in ((0, left.generated_tokens), (1, 1)):
        suspended = run.attempt(tmp_path / step_name(number), number, 0, prompts, carried, budget, None)
        carried = {rollout.key: RolloutOrigin(0) for rollout in suspended if rollout.suspended}
    resumed = read_progress(tmp_path / step_name(2), prompts, run.recipe, carried).partial
    tracks = {partial.key: set(partial.tracks) for partial in resumed}
    assert tracks
    assert all(tracks[each.key] >= set(each.tracks) for each in left.partial if each.key in tracks)


def check_trained_once(case: dict, steps: list, interval: float, cls: type[Dealer] = Dealer) -> None:
    recipe = recipe_of(case)
    lessons, complete = {}, {}
    with tempfile.TemporaryDirectory() as home, patch.object(recorder_module, "INTERVAL", interval):
        run = Run(Path(home), recipe, case["end"], dealt(cls) if case["environment"] else None)
        last = (len(steps), (0, None, 2, []))
        for number, (new, budget, replicas, kills) in [*enumerate(steps), last]:
            rollouts = run.step(number, prompts_of(number, new), budget, replicas, kills)
            of_step = lessons_of(rollouts, recipe)
            assert not of_step.keys() & lessons.keys()
            lessons |= of_step
            for rollout in rollouts:
                assert rollout.key not in complete
                if not rollout.suspended:
                    complete[rollout.key] = rollout
                    assert versions_of(rollout) <= set(range(number + 1))
        assert not run.suspended
        whole = [rollout for prompt_id in run.drawn for rollout in run.whole(prompt_id)]
        for want in whole:
            found = complete.pop(want.key)
            assert content(found) == content(want)
            if case["routes"] and any(map(len, found.parts)):
                check_routes(found)
            for part in found.parts if case["teacher"] else ():
                assert np.array_equal(part.tokens["teacher"], taught(found, part))
            rewards, wanted = ([s.grade and s.grade.reward for s in each.parts] for each in (found, want))
            assert rewards == wanted
        assert not complete
        assert lessons == lessons_of(whole, recipe)
        assert max(run.graded.values(), default=1) == 1, "nothing is graded or taught twice"


@pytest.mark.parametrize("kind", SAMPLINGS)
def test_a_carried_rollout_that_ended_before_a_kill_keeps_its_grades(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(recorder_module, "INTERVAL", 0.0)
    run = Run(tmp_path, recipe_of(SIMPLE | {"kind": kind, "teacher": True}), end=0.15)
    run.step(0, prompts_of(0, 3), budget=30)
    assert run.graded, "of parts that are final"
    assert run.suspended
    run.step(1, [], budget=None, kills=(4,) * 12)
    assert max(run.graded.values()) == 1, "nothing is graded or taught twice"


def test_a_rollout_that_is_suspended_again_keeps_its_origin():
    first, second = RolloutOrigin(1, 3), RolloutOrigin(2, 5)
    ends = {"p": "suspended", "q": "suspended", "r": "truncated", "s": "suspended"}
    rollouts = [
        replace(stream_with("01", end), prompt=Prompt(name, [1], "q", "math", "0"))
        for name, end in ends.items()
    ]
    carried = CarryOver({("p", 0): first, ("r", 0): first})
    for batch in (rollouts[:3], rollouts[3:]):  # of prompts
        carried = carried.suspend(batch, second)
    assert carried.suspended == {("p", 0): first, ("q", 0): second, ("s", 0): second}
    position = json.loads(json.dumps(carried.position()))
    assert CarryOver.at(position) == CarryOver(suspended=carried.suspended)


class RoutingByVersion(Lockstep):
    """Chooses experts by the weights that prefill or decode: each row is the policy version."""

    def _with_routes(self, delta, first):
        def routed(found):
            return {n: np.full_like(v, self.policy_version) if n == "routes" else v for n, v in found.items()}

        delta = super()._with_routes(delta, first)
        return replace(delta, columns=routed(delta.columns), path=routed(delta.path))


@pytest.mark.parametrize("kills", [(), (4, 12)], ids=["", "killed"])
@pytest.mark.parametrize("kind", SAMPLINGS)
def test_tokens_keep_the_routes_of_the_weights_that_sampled_them(kind, kills, tmp_path, monkeypatch):
    monkeypatch.setattr(recorder_module, "INTERVAL", 0.0)
    monkeypatch.setattr(sys.modules[__name__], "Lockstep", RoutingByVersion)
    recipe = recipe_of(SIMPLE | {"kind": kind, "routes": True})
    run = Run(tmp_path, recipe, end=0.1)
    for number, new in enumerate((prompts_of(0, 2), [])):
        run.step(number, new, budget=15)
        assert run.suspended
    found = run.step(2, [], budget=None, kills=kills)
    for rollout in found:
        first = min(part.tokens["versions"].min() for part in rollout.parts)
        assert (rollout.prompt_columns["routes"][1:] == first).all(), "as its first request brought them"
    mixed = 0
    for part in (part for rollout in found for part in rollout.parts):
        versions = part.tokens["versions"]
        assert (part.tokens["routes"] == versions[:, None, None]).all()
        mixed += len(np.unique(versions)) > 1
    assert mixed


def test_a_rollout_is_cut_where_it_would_grow_too_old(tmp_path):
    run = Run(tmp_path, recipe_of(SIMPLE, max_staleness=2), end=0.0)
    for number in range(3):
        found = run.step(number, prompts_of(number, 1), budget=6)
        ages = {number - drawn.step for drawn in run.suspended.values()}
        assert ages == set(range(min(number, 1) + 1)), "nothing is suspended in the second step after its own"
    old = [rollout for rollout in found if rollout.prompt_id == "p#0.0"]
    assert [rollout.outcome for rollout in old] == ["budget", "budget"]
    tails = [tail_of(rollout) for rollout in old]
    assert all(tail is not None and len(tail) > 3 for tail in tails), "with what three steps generated"
    assert [len(np.unique(tail.tokens["versions"])) for tail in tails] == [3, 3]


class Late(Lockstep):
    """Delivers tokens of aborted requests when the next step has begun, as a server may."""

    def __init__(self, *arguments, **settings) -> None:
        super().__init__(*arguments, **settings)
        self.late: list[Delta] = []

    def abort(self, request_ids):
        request_ids = list(request_ids)
        self.late += [self._delta(name) for name in request_ids if name in self.requests]
        super().abort(request_ids)

    def step(self):
        late, self.late = self.late, []
        return late + super().step()


def test_what_arrives_of_a_request_that_the_last_step_aborted_is_ignored(tmp_path):
    found = []
    for engine in (Lockstep, Late):
        run = Run(tmp_path / engine.__name__, recipe_of(SIMPLE), end=0.1)
        run.engine = engine(random.Random(0), 0.1)
        found.append([run.step(number, prompts_of(number, 1), budget=10) for number in range(5)])
    assert found[0] == found[1]
    assert any(segment.carried for step in found[0] for rollout in step for segment in rollout.parts)


def alike(ids: list[int], others: list[int]) -> int:
    """Return the number of first tokens that are the same."""
    pairs = enumerate(zip(ids, others, strict=False))
    return next((n for n, (one, other) in pairs if one != other), min(len(ids), len(others)))


class Caching(Lockstep):
    """Keeps what it has computed until the weights change. Its tokens occur once, so that paths share what
    one has of the other and nothing else."""

    def __init__(self, *arguments, **settings) -> None:
        super().__init__(*arguments, **settings)
        self.fresh, self.computes, self.known = itertools.count(1000), {}, {}
        self.prefills: list[tuple[int, int]] = []
        """(tokens of the path that were computed before, tokens of the path) of each request of the step."""

    def begin(self) -> None:
        self.policy_version += 1
        self.computes.clear()
        self.prefills.clear()

    def submit(self, request):
        super().submit(request)
        length = min(request.max_tokens, random.Random(request.seed + len(request.token_ids)).randint(2, 12))
        tokens = [
            *itertools.islice(self.fresh, length - 1),
            8 if length < request.max_tokens else next(self.fresh),
        ]
        self.requests[request.request_id] = tokens, len(request.token_ids)
        # a token is computed as the next one is sampled
        computed = [path + ids[: max(self.delivered[n] - 1, 0)] for n, (path, ids) in self.computes.items()]
        shared = [alike(request.token_ids, other) for other in computed]
        self.known[request.request_id] = max(shared, default=0), len(request.token_ids)
        self.computes[request.request_id] = list(request.token_ids), tokens

    def _delta(self, name):
        if not self.delivered[name]:
            self.prefills.append(self.known[name])
        return super()._delta(name)


@pytest.mark.parametrize("environment", [False, True], ids=["", "environment"])
@pytest.mark.parametrize("kind", SAMPLINGS)
def test_a_step_computes_of_each_path_what_it_has_not_computed_before(kind, environment, tmp_path):
    recipe = recipe_of(SIMPLE | {"kind": kind, "limit": 40}, block_size=2)
    run = Run(tmp_path, recipe, 0.1, dealt() if environment else None)
    run.engine = Caching(random.Random(0), 0.1)
    resumed = 0
    for number in range(4):
        run.engine.begin()
        # prompts that share three of four tokens, in no order
        new = [replace(p, token_ids=[1, 2, number, p.number * 7 % 5]) for p in prompts_of(number, 2)]
        run.step(number, new, budget=60)
        cached = [min(before, after - 1) // 2 * 2 for before, after in run.engine.prefills]
        both = [(before, after - 1) for before, (_, after) in zip(cached, run.engine.prefills, strict=True)]
        prefilled = sum(after - before for before, after in both)
        assert run.metrics[-1]["harvest/prefilled_tokens"] == prefilled
        seen = sum((after - before) * (after + 1 + before) // 2 for before, after in both)
        assert run.metrics[-1]["harvest/prefill_context"] == seen / prefilled
        resumed += run.metrics[-1]["harvest/carried_tokens"] > 0
    assert resumed


def test_where_a_budget_ends_no_environment_is_waited_for_that_repeats_nothing(tmp_path):
    begun, ends = threading.Event(), threading.Event()

    class Waiting(Dealer):
        def step(self, message: str) -> Observation:
            begun.set()
            ends.wait(5)
            return super().step(message)

    run = Run(tmp_path, recipe_of(SIMPLE), 0.2, dealt(Waiting))
    run.step(0, prompts_of(0, 2), budget=24)
    ends.set()
    assert begun.wait(5)
    assert run.metrics[0]["environment/turns"] == 0, "all are still under way"
    assert run.suspended


@pytest.mark.parametrize("carries", [True, False])
def test_a_run_that_does_not_carry_over_takes_up_nothing_of_one_that_did(carries):
    rollout = SimpleNamespace(carry_over=carries)
    generator = SimpleNamespace(
        source=None, placed=None, carried=CarryOver(), recipe=SimpleNamespace(rollout=rollout)
    )
    Generator.go_to(generator, {"suspended": [["p", 0, 2, 5]]})
    assert list(generator.carried.suspended) == [("p", 0)] * carries


def test_what_was_suspended_and_is_not_there_is_named(tmp_path):
    run = Run(tmp_path, recipe_of(SIMPLE), end=0.0)
    run.step(0, prompts_of(0, 1), budget=6)
    assert list(run.suspended) == [("p#0.0", 0), ("p#0.0", 1)]
    folder, prompts = tmp_path / step_name(1), [prompt for _, prompt in run.drawn.values()]
    assert len(read_progress(folder, prompts, run.recipe, run.suspended).partial) == 2
    for path in (tmp_path / step_name(0)).iterdir():
        path.rename(path.with_suffix(".gone"))
    generator = SimpleNamespace(source=object(), streams=tmp_path)
    with pytest.raises(
        PartialRolloutError, match=r"step-00000000: expected 1 suspended prompts, found nothing"
    ):
        Generator._draw(generator, Step(1, 1), run.suspended, 4)
    for path in (tmp_path / step_name(0)).iterdir():
        path.rename(path.with_suffix(".arrow"))
    with pytest.raises(PartialRolloutError, match=r"step-00000000: expected 3 .*found 2 .*: q/0 is missing"):
        read_progress(folder, prompts, run.recipe, {**run.suspended, ("q", 0): RolloutOrigin(0)})


def test_a_complete_rollout_is_not_resumed(tmp_path):
    run = Run(tmp_path, recipe_of(SIMPLE), end=0.0)
    run.step(0, prompts_of(0, 1), budget=10**6)
    assert not run.suspended
    with pytest.raises(PartialRolloutError, match=r"step-00000000: .*found 0 of them: p#0\.0/0 is missing"):
        read_progress(tmp_path / step_name(1), prompts_of(0, 1), run.recipe, {("p#0.0", 0): RolloutOrigin(0)})


@pytest.mark.parametrize("apart", [False, True], ids=["one step", "two steps"])
@pytest.mark.parametrize("average", sorted(RATIOS))
def test_an_average_over_the_tokens_of_several_rollouts_is_one_of_the_step_that_trains_them(average, apart):
    """Each token of a step weighs the same (``token-mean``), or each rollout of a prompt on average
    (``prompt-mean-token-mean``): whatever the number of steps, the prompt weighs 1/P in all."""
    recipe = make_recipe(
        loss={"rollout_is": "token", "loss_agg_mode": average},
        rollout={"carry_over": True, "tokens_per_step": 1},
        data={"sources": [{"name": "s", "path": "none"}], "max_prompt_length": 8, "prompts_per_step": 5},
    )
    streams = [stream_with("01"), replace(stream_with("0001"), index=1)]
    steps = [[stream] for stream in streams] if apart else [streams]
    units = [weighted_units(rollouts, Job(recipe)) for rollouts in steps]
    weights = [[node.weight for unit in of_step for node in unit.nodes] for of_step in units]
    if average == "token-mean":
        assert weights == [[1 / (2 * len(of_step))] * len(of_step) for of_step in weights]
    else:
        total = sum(weight * 2 for of_step in weights for weight in of_step)
        assert total == pytest.approx(1 / 5)


def stream_with(rewards: str, outcome="truncated") -> Rollout:
    """Return a stream whose A sides were wrong (0) or right (1)."""
    pairs = [
        (Part(Tokens.of([5, 9], [-1, -1]), "stop", Grade(float(r), "")), Part(Tokens.of([6, 7], [-1, -1])))
        for r in rewards
    ]
    return kit.stream(prompts_of(0, 1)[0], 0, 0, pairs, outcome)


def test_new_prompts_are_as_many_as_the_open_tracks_of_carried_ones_leave():
    ended = [Part(Tokens.of([9], [-1]), "stop", Grade(1.0, "")) for _ in range(3)]
    prompt = prompts_of(0, 1)[0]
    group = kit.group(prompt, 0, ended, numbers=[0, 1, 3], outcome="suspended")
    recipe = make_recipe(sampling="independent", group_size=4)
    assert open_prompts([group, replace(group, parts=())], recipe) == 1 / 4 + 1
    streams = [stream_with(rewards, "suspended") for rewards in ("01", "")]
    assert open_prompts(streams, make_recipe(group_size=8)) == 2 / 4
