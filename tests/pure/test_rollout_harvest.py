"""The harvester against a scripted engine that delivers tokens in any order and any chunks.

The script fixes, for every context, the whole continuation each seed would give; ``reference_stream``
below harvests it the paper's way, in lockstep, written independently of the harvester.
"""

from __future__ import annotations

import random
import time
import zlib
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_eqlen.engines.protocol import EngineError
from megatron_eqlen.harvest.harvest import harvest
from megatron_eqlen.harvest.harvest_plan import HarvestPlan
from megatron_eqlen.recipe import Recipe
from megatron_eqlen.recipe.load import parse
from megatron_eqlen.record.partial import HarvestProgress, PartialRollout, RolloutOrigin
from megatron_eqlen.rewards.measured import policy_metrics
from megatron_eqlen.sampling.equal_length.dual_track import DualTrack, pairs_of, tail_of
from megatron_eqlen.sampling.harvester import Harvester, HarvestObserver, every_rollout
from megatron_eqlen.sampling.track import track_seed
from megatron_eqlen.tokens import Ragged, Tokens
from megatron_eqlen.types import Delta, Grade, Metrics, Part, Prompt, Rollout
from tests.kit.marks import examples
from tests.kit.observers import OnPart
from tests.kit.recipes import SMALL

EOS = {8, 9}


def make_recipe(**over) -> Recipe:
    """Return a recipe for harvests alone, which the objective need not take."""
    rollout = {"max_response_length": 12, "max_num_seqs": 6, "top_k": 0, "top_p": 1.0}
    data = SMALL["data"] | {"max_prompt_length": 8}
    rollout |= over.pop("rollout", {})
    return parse(SMALL | {"group_size": 4, "data": data, "rollout": rollout} | over, "test")


def make_prompts(count: int) -> list[Prompt]:
    return [Prompt(f"p#{i}", [1, i], "q", "math", "0") for i in range(count)]


def harvested(
    engine: ScriptedEngine, recipe: Recipe | None = None, prompts: int = 2, seed: int = 0,
    observers: Sequence[HarvestObserver] = (), **plan: Any,
) -> tuple[list[Rollout], Metrics]:  # fmt: skip
    """Return rollouts and metrics of a harvest of that many prompts."""
    made = HarvestPlan(make_prompts(prompts), recipe or make_recipe(), EOS, seed=seed, **plan)
    return harvest(engine, made, observers)


def continuation(context: list[int], seed: int, end: float) -> list[int]:
    """Return the continuation: token t depends on (seed, t) and the tokens before it, as a model's does."""
    tokens: list[int] = []
    while not tokens or tokens[-1] not in EOS:
        draw = random.Random(f"{seed}|{len(context) + len(tokens)}|{(context + tokens)[-3:]}")
        tokens.append(draw.choice(sorted(EOS)) if draw.random() < end else draw.randrange(2, 8))
        if len(tokens) > 64:
            break
    return tokens


@dataclass
class ScriptedEngine:
    """Delivers ``continuation`` in chunks that ``chaos`` chooses; may lose requests."""

    chaos: random.Random
    end: float = 0.2
    loss: float = 0.0
    max_model_len: int = 64
    max_num_seqs: int = 6
    vocab_size: int = 1000
    policy_version: int = 3
    version_tokens: int | None = None
    """Number of tokens of each path after which the weights change; None: never."""
    max_chunk: int = 5
    max_losses: int = 3
    losses: Counter = field(default_factory=Counter)
    requests: dict[str, tuple[list[int], int]] = field(default_factory=dict)
    delivered: dict[str, int] = field(default_factory=dict)
    aborted: list[str] = field(default_factory=list)
    submitted: list[tuple[str, list[int], int]] = field(default_factory=list)
    cached_at_end: bool = False
    """Tell how many tokens were cached with a request's last tokens, as servers do."""
    routes: bool = False
    paths: dict[str, tuple[list[int], int, int]] = field(default_factory=dict)
    """(context and tokens, length of the context, rows of its path that it brings) of each request."""

    def submit(self, request):
        assert request.request_id not in self.requests
        assert request.max_tokens >= 1
        tokens = continuation(request.token_ids, request.seed, self.end)[: request.max_tokens]
        self.requests[request.request_id] = (tokens, len(request.token_ids))
        self.delivered[request.request_id] = 0
        self.submitted.append((request.request_id, list(request.token_ids), request.seed))
        self.paths[request.request_id] = (
            [*request.token_ids, *tokens],
            len(request.token_ids),
            request.path_rows,
        )

    def step(self):
        chosen = [name for name in self.requests if self.chaos.random() < 0.6]
        self.chaos.shuffle(chosen)
        return [self._delta(name) for name in chosen]

    def _delta(self, name):
        tokens, start = self.requests[name]
        first = self.delivered[name]
        last = min(first + self.chaos.randint(1, self.max_chunk), len(tokens))
        version = None
        if self.version_tokens is not None:
            runs, beyond = divmod(start + first, self.version_tokens)
            version, last = self.policy_version + runs, min(last, first + self.version_tokens - beyond)
        self.delivered[name] = last
        chunk = tokens[first:last]
        reason = None
        if last == len(tokens):
            reason = "stop" if tokens[-1] in EOS else "length"
            del self.requests[name]
        elif self.chaos.random() < self.loss and self.losses[name.split("~")[0]] < self.max_losses:
            self.losses[name.split("~")[0]] += 1
            reason = "lost"
            del self.requests[name]
        logprobs = [-(start + first + i) / 7 for i in range(len(chunk))]
        mask = [(token, token + 100) for token in chunk]
        tells = reason is not None if self.cached_at_end else first == 0
        cached = start - start % 4 if tells else None
        delta = Delta(name, chunk, {"logprobs": logprobs, "kept": mask}, reason, cached, version)
        return self._with_routes(delta, first) if self.routes else delta

    def _with_routes(self, delta, first):
        if first == 0 and delta.finish_reason == "lost":  # before its first token
            self.delivered[delta.request_id] = 0
            return Delta(delta.request_id, [], {}, "lost")
        path, start, asked = self.paths[delta.request_id]
        routes = routes_of(path, start + first, start + first + len(delta.token_ids))
        rows = {"routes": routes_of(path, 1, 1 + asked)} if asked and first == 0 else {}
        return replace(delta, columns={**delta.columns, "routes": routes}, path=rows)

    def abort(self, request_ids):
        for name in request_ids:
            if self.requests.pop(name, None):
                self.aborted.append(name)

    @property
    def has_unfinished(self):
        return bool(self.requests)

    def metrics(self):
        return {}


class Lockstep(ScriptedEngine):
    """Gives every request a chunk a step."""

    steps = 0

    def step(self):
        self.steps += 1
        return [self._delta(name) for name in list(self.requests)]


def routes_of(path: list[int], first: int, stop: int) -> np.ndarray:
    """Return routes of tokens ``first`` to ``stop`` of a path; each depends on all tokens before it."""
    rows = [[zlib.crc32(bytes(path[:place])) % 256, place] for place in range(first, stop)]
    return np.array(rows, np.uint8).reshape(-1, 1, 2)


def versions_of(rollout: Rollout) -> set[int]:
    """Return the policy versions that sampled a rollout's tokens; the rollout's own if it has no tokens."""
    found = {int(version) for s in rollout.parts for version in np.unique(s.tokens["versions"])}
    return found or {rollout.policy_version}


def without(delta: Delta, column: str) -> Delta:
    """Return the delta without one of its columns."""
    return replace(delta, columns={name: found for name, found in delta.columns.items() if name != column})


def check_routes(rollout: Rollout) -> None:
    """Assert that every row is its token's, wherever its path forks, and that the prompt's are there."""
    prompt = rollout.prompt.token_ids
    assert np.array_equal(rollout.prompt_columns["routes"][1:], routes_of(prompt, 1, len(prompt)))
    paths: dict[int, list[int]] = {-1: prompt}
    for part in rollout.parts:
        before = paths[part.parent]
        paths[part.number] = path = before + part.token_ids.tolist()
        expected = routes_of(path, len(before), len(path))
        expected[~part.tokens.is_generated] = 0
        assert np.array_equal(part.tokens["routes"], expected)


def reference_stream(prompt: Prompt, index: int, recipe: Recipe, seed: int, end: float) -> dict:
    """Run the paper's lockstep: decode two tracks position by position; at an end, pair, inherit, and start a
    new track beside the survivor."""
    limit = recipe.rollout.max_response_length
    max_pairs = recipe.equal_length.max_pairs

    def fresh(number: int, trunk: list[int]) -> list[int]:
        track = track_seed(seed, prompt.prompt_id, index, number)
        return trunk + continuation(prompt.token_ids + trunk, track, end)

    base, pairs, launched = 0, [], 2
    survivor, partner = fresh(0, []), fresh(1, [])
    for position in range(limit):
        ends = [path for path in (survivor, partner) if path is not None and path[position] in EOS]
        if partner is None or not ends:
            continue
        a, b = (survivor, partner) if survivor[position] in EOS else (partner, survivor)
        pairs.append((a[base : position + 1], b[base : position + 1]))
        base = position + 1
        if len(ends) == 2:
            return {"pairs": pairs, "outcome": "both_ended", "tail": []}
        survivor, partner = b, None
        if base == limit:
            break
        if len(pairs) == max_pairs:
            stop = next((i + 1 for i, token in enumerate(survivor) if token in EOS), limit)
            return {"pairs": pairs, "outcome": "max_pairs", "tail": survivor[base : min(stop, limit)]}
        partner = fresh(launched, survivor[:base])
        launched += 1
        if survivor[base - 1] in EOS:
            raise AssertionError
    return {"pairs": pairs, "outcome": "truncated", "tail": survivor[base:limit]}


def shape(stream: Rollout) -> dict:
    return {
        "pairs": [(pair.a.token_ids.tolist(), pair.b.token_ids.tolist()) for pair in pairs_of(stream)],
        "outcome": stream.outcome,
        "tail": tail_of(stream).token_ids.tolist() if tail_of(stream) else [],
    }


def check_logprobs(rollout: Rollout, start: int) -> None:
    """Check the script's log-prob of a token, which encodes its position, and its mask: the token."""
    ends = rollout.ends()
    for segment in rollout.parts:
        offset = start + ends[segment.parent]
        logprobs = np.array([-(offset + i) / 7 for i in range(len(segment))], np.float32)
        assert np.array_equal(segment.tokens["logprobs"], logprobs)
        assert segment.tokens["kept"] == Ragged.of((token, token + 100) for token in segment.token_ids)


cases = st.fixed_dictionaries(
    {
        "chaos": st.integers(0, 2**32), "seed": st.integers(0, 2**32 - 1),
        "end": st.sampled_from([0.02, 0.1, 0.3, 0.7]), "limit": st.integers(1, 24),
        "max_pairs": st.sampled_from([None, None, 1, 2, 3]), "max_num_seqs": st.integers(1, 12),
        "max_chunk": st.integers(1, 9), "loss": st.sampled_from([0.0, 0.0, 0.1]),
    }
)  # fmt: skip


def run_case(case: dict, prompts: int = 3, **over) -> tuple[list[Rollout], dict, ScriptedEngine, Recipe]:
    recipe = make_recipe(
        rollout={"max_response_length": case["limit"], "max_num_seqs": case["max_num_seqs"]},
        equal_length={"max_pairs": case["max_pairs"]},
        **over,
    )
    engine = ScriptedEngine(
        random.Random(case["chaos"]), case["end"], case["loss"], max_num_seqs=case["max_num_seqs"],
        max_chunk=case["max_chunk"],
    )  # fmt: skip
    rollouts, metrics = harvested(engine, recipe, prompts, case["seed"])
    return rollouts, metrics, engine, recipe


@examples(100)
@given(cases)
def test_streams_are_the_lockstep_harvest_whatever_the_delivery(case):
    rollouts, metrics, engine, recipe = run_case(case)
    prompts = {prompt.prompt_id: prompt for prompt in make_prompts(3)}
    assert [(r.prompt_id, r.index) for r in rollouts] == [(p, k) for p in prompts for k in range(2)]
    for stream in rollouts:
        expected = reference_stream(
            prompts[stream.prompt_id], stream.index, recipe, case["seed"], case["end"]
        )
        found = shape(stream)
        # Which side of a tie is A is a convention; both ended, so both are complete responses.
        if expected["outcome"] == "both_ended":
            assert sorted(map(str, found["pairs"].pop())) == sorted(map(str, expected["pairs"].pop()))
        assert found == expected
        check_logprobs(stream, start=2)
    assert not engine.requests, "a request was left running"
    # a fork's path goes on behind its prompt; a request that was lost is no fork
    forks = [name for name, path, _ in engine.submitted if len(path) > 2 and "~" not in name]
    assert metrics["harvest/forks"] == len(forks)
    # What is not kept is the second of two truncated tracks: it is nobody's prefix.
    unkept = metrics["harvest/generated_tokens"] - sum(len(s) for stream in rollouts for s in stream.parts)
    truncated = sum(stream.outcome == "truncated" for stream in rollouts)
    assert 0 <= unkept <= truncated * case["limit"]


@pytest.mark.parametrize(("sampling", "objective"), [
    ("equal_length", "grpo"), ("independent", "grpo"), ("tree", "treerpo"),
])  # fmt: skip
def test_means_over_draws_are_the_policys_where_means_over_ended_responses_are_not(sampling, objective):
    """Each token ends a response with probability 0.2. Responses that end after more than 4 tokens get 1,
    responses that do not end within 12 get 0."""
    tree = {"branching": 2, "forks": 2}
    recipe = make_recipe(sampling=sampling, objective=objective, group_size=8, tree_sampling=tree)
    engine = ScriptedEngine(random.Random(1), max_num_seqs=400)
    rollouts, _ = harvested(engine, recipe, 150, seed=7)
    ended = [(segment, len(tokens)) for rollout in rollouts for segment, tokens in rollout.ended()]
    for segment, length in ended:
        segment.grade = Grade(float(length > 4), "scored")
    metrics = policy_metrics(rollouts)
    survival = 0.8
    assert metrics["policy/rollouts"] == len(rollouts)
    assert metrics["policy/response_length"] == pytest.approx((1 - survival**12) / 0.2, abs=0.35)
    assert metrics["policy/reward"] == pytest.approx(survival**4 - survival**12, abs=0.05)
    plain = np.mean([length > 4 for _, length in ended])
    assert bool(plain > metrics["policy/reward"] + 0.1) == (sampling != "independent")


@examples(40)
@given(cases)
def test_independent_completions(case):
    rollouts, metrics, _, _ = run_case(case, sampling="independent")
    assert [group.prompt_id for group in rollouts] == ["p#0", "p#1", "p#2"]
    for prompt, group in zip(make_prompts(3), rollouts, strict=True):
        check_logprobs(group, start=2)
        for number, completion in enumerate(group.parts):
            seed = track_seed(case["seed"], prompt.prompt_id, 0, number)
            full = continuation(prompt.token_ids, seed, case["end"])
            assert completion.token_ids.tolist() == full[: case["limit"]]
            ended = completion.token_ids[-1] in EOS
            assert completion.finish_reason == ("stop" if ended else "length")
    assert metrics["harvest/generated_tokens"] == sum(len(s) for g in rollouts for s in g.parts)
    lengths = [len(s) for g in rollouts for s in g.parts if s.token_ids[-1] in EOS]
    assert metrics["harvest/ended_responses"] == len(lengths)
    assert metrics.get("harvest/ended_response_length", 0) == pytest.approx(np.mean(lengths or [0]))


@examples(40)
@given(cases, st.integers(1, 80))
def test_a_token_budget_ends_the_step_and_keeps_whole_pairs(case, budget):
    recipe = make_recipe(rollout={"max_response_length": case["limit"], "tokens_per_step": budget})
    engine = ScriptedEngine(random.Random(case["chaos"]), case["end"], max_num_seqs=4, max_chunk=3)
    rollouts, metrics = harvested(engine, recipe, 3, case["seed"])
    no_budget = make_recipe(rollout={"max_response_length": case["limit"]})
    unlimited, _ = harvested(ScriptedEngine(random.Random(0), case["end"]), no_budget, 3, case["seed"])
    free = {(stream.prompt_id, stream.index): stream for stream in unlimited}
    assert not engine.requests
    # One step may bring a chunk from each of the requests that run (forks may exceed the slots by one).
    assert metrics["harvest/generated_tokens"] < budget + 3 * (engine.max_num_seqs + 2)
    for stream in rollouts:
        whole = free[stream.prompt_id, stream.index]
        if stream.outcome == "budget":
            assert pairs_of(stream) == pairs_of(whole)[: len(pairs_of(stream))]
        else:
            assert stream == whole


def test_a_budget_is_used_up_by_as_many_tokens():
    """Four requests get a token each a step, and none ends."""

    for budget, generated in ((7, 8), (8, 8), (9, 12)):
        engine = Lockstep(random.Random(0), end=0.0, max_chunk=1)
        _, metrics = harvested(engine, make_recipe(rollout={"tokens_per_step": budget}), prompts=1)
        assert metrics["harvest/generated_tokens"] == generated


@examples(12)
@given(cases, st.sampled_from(["equal_length", "independent", "tree"]), st.sampled_from([None, 40]))
def test_of_rollouts_that_another_rank_keeps_there_are_token_ids_alone(case, sampling, budget):
    recipe = make_recipe(
        sampling=sampling,
        rollout={"max_response_length": case["limit"], "tokens_per_step": budget},
        **({"objective": "treerpo"} if sampling == "tree" else {}),
    )

    def rollouts(keeps_columns=every_rollout) -> list[Rollout]:
        engine = ScriptedEngine(random.Random(case["chaos"]), case["end"], case["loss"])
        return harvested(engine, recipe, 3, case["seed"], keeps_columns=keeps_columns)[0]

    def mine(prompt: Prompt, index: int) -> bool:
        return (prompt.token_ids[1] + index) % 2 == 0

    for found, full in zip(rollouts(mine), rollouts(), strict=True):
        if mine(found.prompt, found.index):
            assert found == full
            continue
        for segment, wanted in zip(found.parts, full.parts, strict=True):
            assert segment == replace(wanted, tokens=wanted.tokens.only(["token_ids", "versions"]))


@examples(40)
@given(cases, st.sampled_from(["equal_length", "independent", "tree"]), st.sampled_from([None, 5, 80]))
def test_parts_are_announced_as_they_become_final_and_make_up_the_rollout(case, sampling, budget):
    """Each part is announced once, with its response; ``parts`` and ``ended`` list them."""
    announced: dict[tuple[str, int], dict[int, tuple[Part, list[int]]]] = defaultdict(dict)

    def hear(harvester: Harvester, part: Part) -> None:
        key = harvester.prompt.prompt_id, harvester.index
        assert part.number not in announced[key]
        announced[key][part.number] = part, harvester.response(part).tolist()

    recipe = make_recipe(
        sampling=sampling,
        rollout={"max_response_length": case["limit"], "tokens_per_step": budget},
        equal_length={"max_pairs": case["max_pairs"]},
        **({"objective": "treerpo"} if sampling == "tree" else {}),
    )
    engine = ScriptedEngine(random.Random(case["chaos"]), case["end"])
    rollouts, _ = harvested(engine, recipe, 3, case["seed"], [OnPart(hear)])
    for rollout in rollouts:
        heard = announced[rollout.key]
        parts = list(rollout.parts)
        assert sampling != "independent" or len(parts) == recipe.group_size, "also where a budget ends it"
        assert [heard[number][0] for number in sorted(heard)] == parts
        responses = {id(segment): tokens.tolist() for segment, tokens in rollout.ended()}
        for part, response in heard.values():
            if part.finish_reason == "stop":
                assert responses.pop(id(part)) == response
        assert not responses


@examples(25)
@given(cases)
def test_a_harvester_is_asked_where_a_track_ends_and_not_at_every_token(case):
    """The harvester is asked once for each track that ends, once after it was launched, and at most once more
    while the other track catches up with it."""
    asked = Counter()

    def count(self):
        asked[self.prompt.prompt_id, self.index] += 1
        return advance(self)

    advance, DualTrack.advance = DualTrack.advance, count
    try:
        _, metrics, _, _ = run_case(case)
    finally:
        DualTrack.advance = advance
    assert asked.total() <= 3 * (metrics["harvest/requests"] - metrics["harvest/retries"])


@pytest.mark.parametrize("cached_at_end", [False, True])
def test_the_worked_example_of_types(cached_at_end):
    """q = [1, 2]; track 1: 5 9; track 2: 6 7 8 9; the fork after q B_1: 4 4 9."""
    scripts = {(1, 2): [[5, 9], [6, 7, 8, 9]], (1, 2, 6, 7): [[4, 4, 9]], (1, 2, 6, 7, 4, 4): [[9]]}

    class Script(ScriptedEngine):
        def submit(self, request):
            super().submit(request)
            self.requests[request.request_id] = (
                scripts[tuple(request.token_ids)].pop(0),
                len(request.token_ids),
            )

    recipe = make_recipe(group_size=2)
    prompt = Prompt("p", [1, 2], "q", "math", "0")
    engine = Script(random.Random(0), max_chunk=1, cached_at_end=cached_at_end)
    (stream,), metrics = harvest(engine, HarvestPlan([prompt], recipe, {9}, seed=0))
    assert shape(stream)["pairs"] == [([5, 9], [6, 7]), ([8, 9], [4, 4]), ([9], [9])]
    assert stream.outcome == "both_ended"
    assert stream.policy_version == 3
    expected = {
        "generated_tokens": 10, "supervised_tokens": 10, "forks": 2, "forks_prefilled": 2, "streams": 1,
        "fork_prefix_tokens": 4 + 6, "fork_cached_tokens": 4 + 4, "recomputed_tokens_per_fork": (0 + 2) / 2,
        "masked_tokens": 10, "kept_per_token": 2, "policy_version": 3,
        "pairs_per_stream": 3, "segment_length": 5 / 3, "segment_length_max": 2, "both_ended_fraction": 1,
        "ended_responses": 4, "ended_response_length": (2 + 4 + 5 + 5) / 4, "tail_tokens": 0, "retries": 0,
        "context": (2 * (2 + 3) + 2 * (4 + 5) + 2 * 6) / 10,
        "prefilled_tokens": 1 + 1 + 3 + 5, "prefill_context": (1 + 1 + 1 + 2 + 3 + 15) / 10,
    }  # fmt: skip
    assert {name: metrics[f"harvest/{name}"] for name in expected} == expected


@pytest.mark.parametrize("carried", [False, True], ids=["new", "carried"])
@pytest.mark.parametrize("slots", [1, 2, 3])
def test_a_rollout_begins_only_where_a_slot_is_free(slots, carried):
    begun: set[str] = set()

    class Slots(ScriptedEngine):
        def submit(self, request):
            rollout = request.request_id.rpartition("/")[0]
            assert rollout in begun or len(self.requests) < slots, "it would wait there before forks"
            begun.add(rollout)
            super().submit(request)

    # of an earlier step, whose budget was used up before they began
    keys = [(prompt, index) for prompt in make_prompts(4) for index in range(2)] if carried else []
    partial = [PartialRollout(*key, origin=RolloutOrigin(0), age=1) for key in keys]
    harvested(Slots(random.Random(0), max_num_seqs=slots), prompts=4, progress=HarvestProgress((), partial))
    assert len(begun) == 4 * 2


@pytest.mark.parametrize("kind", [
    {}, {"sampling": "tree", "objective": "rloo", "tree_sampling": {"forks": 2, "step_tokens": 3}},
], ids=["pairs", "tree"])  # fmt: skip
def test_a_fork_is_submitted_in_the_step_that_made_its_length_certain(kind):
    """Both tracks run at one position, so a fork at trunk length n must be there after exactly n steps."""

    class Counted(Lockstep):
        def submit(self, request):
            super().submit(request)
            assert len(request.token_ids) - 2 == self.steps

    engine = Counted(random.Random(1), end=0.05, max_num_seqs=64, max_chunk=1)
    recipe = make_recipe(rollout={"max_response_length": 24, "max_num_seqs": 64}, **kind)
    _, metrics = harvested(engine, recipe, 4, seed=5)
    assert metrics["harvest/forks"] > 0
    assert metrics["harvest/recomputed_tokens_per_fork"] < 4  # the script caches blocks of 4


def test_speeds_are_of_this_attempt_and_counts_of_all(monkeypatch):
    """A clock that stands still but for 2 s in each step of the engine, and 0.25 s for each submission."""
    clock = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])

    class Clocked(ScriptedEngine):
        deltas = 0

        def submit(self, request):
            clock[0] += 0.25
            super().submit(request)

        def step(self):
            clock[0] += 2
            found = super().step()
            self.deltas += len(found)
            return found

    engine, earlier = Clocked(random.Random(0)), Counter(engine_steps=7, deltas=20, requests=4)
    progress = HarvestProgress(generated_tokens=50, counts=earlier)
    _, metrics = harvested(engine, progress=progress)
    requests = len(engine.submitted)
    steps = int((clock[0] - 0.25 * requests) / 2)
    assert steps > 7
    assert {name: metrics[f"harvest/{name}"] for name in ("engine_steps", "requests", "seconds")} == {
        "engine_steps": 7 + steps, "requests": 4 + requests, "seconds": clock[0],
    }  # fmt: skip
    generated = sum(engine.delivered.values())
    assert metrics["harvest/generated_tokens"] == 50 + generated
    assert metrics["harvest/tokens_per_second"] == generated / clock[0]
    assert metrics["harvest/overhead_seconds_per_step"] == 0.25 * requests / steps
    assert metrics["harvest/slot_occupancy"] == (20 + engine.deltas) / (6 * (7 + steps))


@pytest.mark.parametrize("carry_over", [True, False])
def test_rollouts_that_earlier_steps_began_are_counted_and_not_those_of_a_killed_attempt(carry_over):
    recipe = make_recipe(rollout={"carry_over": True, "tokens_per_step": 100} if carry_over else {})
    origins = (RolloutOrigin(0) if carry_over else None), None
    partial = [
        PartialRollout(prompt, 0, origin=origin)
        for prompt, origin in zip(make_prompts(2), origins, strict=True)
    ]
    engine = ScriptedEngine(random.Random(0))
    _, metrics = harvested(engine, recipe, progress=HarvestProgress(partial=partial))
    assert metrics.get("harvest/carried_rollouts") == (1 if carry_over else None)


def test_what_prompts_share_is_computed_once_also_in_several_attempts():
    prompts = [Prompt(name, [1, *ids], "q", "math", "0") for name, ids in (("a", [5, 5, 5]), ("b", [0]))]
    prompts.append(Prompt("c", [1, 5, 5, 6], "q", "math", "0"))
    recipe = make_recipe(rollout={"block_size": 1})

    def prefilled(prompts: list[Prompt], *recorded: Rollout) -> tuple[list[Rollout], float]:
        plan = HarvestPlan(prompts, recipe, EOS, seed=0, progress=HarvestProgress(recorded))
        rollouts, metrics = harvest(ScriptedEngine(random.Random(0)), plan)
        return rollouts, metrics["harvest/prefilled_tokens"]

    (recorded, first), (_, whole) = prefilled(prompts[:2]), prefilled(prompts)
    assert first + prefilled(prompts, *recorded)[1] == whole


TWO = {"routes": np.zeros((2, 1, 2), np.uint8)}


@pytest.mark.parametrize(("found", "message"), [
    ({"columns": {"logprobs": []}}, "expected logprobs of 1 tokens, found 0"),
    ({"columns": {"logprobs": [-1.0]}}, "expected routes of 1 tokens, found 0"),
    ({"columns": {"logprobs": [-1.0]} | TWO}, "expected routes of 1 tokens, found 2"),
    ({"path": {}}, "of the first 1 positions of its path, found 0"),
    ({"path": TWO}, "of the first 1 positions of its path, found 2"),
])  # fmt: skip
def test_a_row_that_is_missing_or_too_many_is_an_error(found, message):
    class Broken(ScriptedEngine):
        def _delta(self, name):
            return replace(super()._delta(name), **found)

    engine = Broken(random.Random(0), max_chunk=1, routes=True)
    with pytest.raises(EngineError, match=message):
        harvested(engine, make_recipe(rollout={"keep_routes": True}))
    assert not engine.requests


def test_earlier_tokens_without_routes_are_not_continued():
    recipe = make_recipe(rollout={"keep_routes": True})
    engine = ScriptedEngine(random.Random(0), routes=True)
    partial = PartialRollout(make_prompts(1)[0], 0, {1: Tokens.of([5, 5], [-1.0, -1.0], versions=0)})
    with pytest.raises(EngineError, match=r"p#0/0/1: expected routes of 2 tokens .*, found none"):
        harvested(engine, recipe, progress=HarvestProgress(partial=[partial]))
    assert not engine.requests


def test_a_request_that_is_always_lost_is_an_error_and_nothing_stays_running():
    engine = ScriptedEngine(random.Random(0), end=0.0, loss=1.0, max_chunk=1, max_losses=99)
    with pytest.raises(EngineError, match=r"'lost' after 4 of 12 tokens .* 4 times"):
        harvested(engine)
    assert not engine.requests


def test_a_request_may_be_lost_again_under_each_version_of_the_weights():
    """As those of a server that dies and comes back, in a harvest of hours with many syncs."""

    class Synced(ScriptedEngine):
        def step(self):
            self.policy_version += 1
            return super().step()

    engine = Synced(random.Random(0), end=0.0, loss=1.0, max_chunk=1, max_losses=6)
    rollouts, metrics = harvested(engine)
    assert {*engine.losses.values()} == {6}, "four times would be an error"
    assert metrics["harvest/retries"] == engine.losses.total()
    _, kept = harvested(ScriptedEngine(random.Random(0), end=0.0, max_chunk=1))
    assert metrics["harvest/prefilled_tokens"] == kept["harvest/prefilled_tokens"], "as those of a resume"
    assert {part.finish_reason for rollout in rollouts for part in rollout.parts} == {"length"}


def test_routes_of_a_prompt_come_with_another_request_where_the_first_is_lost():
    """Each request is lost before its first token, once."""
    engine = ScriptedEngine(random.Random(0), loss=1.0, max_losses=1, routes=True)
    rollouts, metrics = harvested(engine, make_recipe(rollout={"keep_routes": True}))
    assert metrics["harvest/retries"] >= 2 * len(rollouts)
    for rollout in rollouts:
        check_routes(rollout)


def test_one_request_of_each_rollout_brings_the_routes_of_its_prompt():
    engine = ScriptedEngine(random.Random(0), routes=True)
    rollouts, _ = harvested(engine, make_recipe(rollout={"keep_routes": True}))
    brought = Counter(name.rpartition("/")[0] for name, (_, _, rows) in engine.paths.items() if rows)
    assert brought == {f"{rollout.prompt_id}/{rollout.index}": 1 for rollout in rollouts}


def test_a_request_of_an_engine_that_does_not_know_the_end_is_aborted_there():
    class Endless(ScriptedEngine):
        def submit(self, request):
            super().submit(request)
            tokens, start = self.requests[request.request_id]
            self.requests[request.request_id] = [*tokens, *[5] * 200], start

    endless, engine = (made(random.Random(0)) for made in (Endless, ScriptedEngine))
    assert harvested(endless)[0] == harvested(engine)[0]
    assert sorted(endless.aborted) == sorted(name for name, *_ in engine.submitted)


def test_a_hang_is_an_error():
    class Hung(ScriptedEngine):
        def step(self):
            return []

    hung = Hung(random.Random(0))
    with pytest.raises(EngineError, match=r"no token for .* with 4 requests in flight"):
        harvested(hung, make_recipe(rollout={"request_timeout": 0.05}), prompts=1)
    assert not hung.requests


@pytest.mark.parametrize(("prompts", "message"), [
    ([Prompt("a", [1] * 60, "", "", "")], r"prompt a: 60 tokens \+ .* 12 = 72 exceed the engine's 64"),
    ([Prompt("a", [], "", "", "")], "prompt a: expected at least one token"),
    ([Prompt("a", [5, 1000, 2], "", "", "")], r"prompt a: expected token ids in 0\.\.999, found 2 to 1000"),
    ([Prompt("a", [5, -1], "", "", "")], r"prompt a: expected token ids in 0\.\.999, found -1 to 5"),
    (make_prompts(1) * 2, "prompt p#0: expected once"),
])  # fmt: skip
def test_prompts_that_cannot_run_are_refused_before_anything_is_submitted(prompts, message):
    engine = ScriptedEngine(random.Random(0))
    with pytest.raises(ValueError, match=message):
        harvest(engine, HarvestPlan(prompts, make_recipe(), EOS, seed=0))
    assert not engine.submitted


def test_seeds_are_the_same_on_every_machine():
    assert track_seed(1, "deepmath/x#17", 2, 3) == track_seed(1, "deepmath/x#17", 2, 3)
    seeds = {track_seed(s, p, i, n) for s in range(3) for p in ("a", "b") for i in range(3) for n in range(9)}
    assert len(seeds) == 162
    assert all(0 <= seed < 2**63 for seed in seeds)
