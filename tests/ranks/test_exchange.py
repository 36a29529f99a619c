"""Ranks that know skeletons of each other's rollouts train what ranks that know everything train."""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tests.kit.rollouts as kit
from megatron_eqlen.job import Job
from megatron_eqlen.models.groups import start
from megatron_eqlen.objectives.build import build_minibatches
from megatron_eqlen.packing.pack import Layout, Packing, plan_rows
from megatron_eqlen.recipe import Recipe
from megatron_eqlen.run.replicas import rollouts_of_all_ranks
from megatron_eqlen.tokens import Placeholder, Tokens
from megatron_eqlen.training import exchange
from megatron_eqlen.training.exchange import Placement, exchange_paths, exchange_tokens
from megatron_eqlen.training.policy import Policy
from megatron_eqlen.types import Grade, Node, Part, Prompt, Rollout
from tests.kit.distributed import run_ranks
from tests.kit.marks import slow
from tests.kit.routes import any_routes
from tests.kit.updates import heard, layout, recipe_of, weights_of

LONGEST = 40
MOE_LAYERS = 3


# ---- rollouts of every kind ------------------------------------------------------------------------------


def segment(rng: np.random.Generator, length: int, masks: bool, ended: bool) -> Part:
    tokens = rng.integers(3, 90, length)
    kept = [sorted({int(t), *rng.integers(3, 90, rng.integers(0, 6)).tolist()}) for t in tokens]
    grade = Grade(float(rng.integers(0, 2)), "scored") if ended else None
    table = Tokens.of(tokens, -rng.exponential(1.0, length), kept=kept if masks else None, versions=3)
    return Part(table, "stop" if ended else None, grade)


def rollouts_of(seed: int, sampling: str, masks: bool, routes: bool = False) -> list[Rollout]:
    """Return rollouts of three prompts, the first of one token."""
    made = _rollouts_of(seed, sampling, masks)
    rng = np.random.default_rng(seed)
    for rollout in made if routes else ():
        of_prompt = any_routes(rng, len(rollout.prompt.token_ids), MOE_LAYERS)
        rollout.prompt_columns = Tokens({"routes": of_prompt})
        for sampled in rollout.parts:
            routes_of_tokens = any_routes(rng, len(sampled), MOE_LAYERS)
            sampled.tokens = sampled.tokens.with_column("routes", routes_of_tokens)
    return made


def _rollouts_of(seed: int, sampling: str, masks: bool) -> list[Rollout]:
    rng = np.random.default_rng(seed)
    prompts = [Prompt(f"q{n}", [1] * (1 + 2 * n), "?", "math", "7" * 1000, number=n) for n in range(3)]
    made: list[Rollout] = []
    for prompt in prompts:
        if sampling == "equal_length":
            for index in range(2):
                lengths = rng.integers(1, 9, rng.integers(0, 5)).tolist()
                pairs = [(segment(rng, n, masks, True), segment(rng, n, masks, False)) for n in lengths]
                tail = segment(rng, 3, masks, bool(rng.integers(2)))
                made.append(kit.stream(prompt, index, 0, pairs, "both_ended", tail))
        elif sampling == "independent":
            ends = [segment(rng, int(rng.integers(1, 20)), masks, True) for _ in range(4)]
            made.append(kit.group(prompt, 0, ends))
        else:
            steps = [segment(rng, int(rng.integers(1, 9)), masks, n > 1) for n in range(6)]
            made.append(kit.tree(prompt, 0, steps, [-1, -1, 0, 0, 1, 1]))
    return made


def recipe(sampling: str, masks: bool, folder: str = "model", **changes: Any) -> Recipe:
    kept = {"keep_sampling_mask": masks, "top_k": 6 if masks else 0, "top_p": 1.0}
    return recipe_of(
        folder,
        {
            "sampling": sampling,
            "objective": "treerpo" if sampling == "tree" else "grpo",
            "rollout": {"max_response_length": LONGEST, "temperature": 1.0} | kept,
            "packing": {"max_tokens_per_row": 2 * LONGEST},
        }
        | changes,
    )


# ---- the exchange ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    seed: int
    sampling: str
    masks: bool
    routes: bool
    rows: Layout
    stages: int
    tensor: int
    one_home: bool
    """True if rank 0 has graded everything, as with servers."""
    older: bool
    """True if the step may train tokens of older weights, so that the loss reads their versions."""


cases = st.builds(
    Case,
    seed=st.integers(0, 10**6),
    sampling=st.sampled_from(["equal_length", "independent", "tree"]),
    masks=st.booleans(),
    routes=st.booleans(),
    rows=st.sampled_from(["tree", "expanded"]),
    stages=st.sampled_from([1, 2]),
    tensor=st.sampled_from([1, 2]),
    one_home=st.booleans(),
    older=st.booleans(),
)


def placements_of(world: int, case: Case) -> list[Placement]:
    """Return the placement of tensor-parallel ranks next to each other, pipeline stages furthest apart, as
    Megatron's are. The first of two stages has the first layer and the last, as an interleaved one may."""
    tensor = case.tensor if world % case.tensor == 0 else 1
    stages = case.stages if world % (case.stages * tensor) == 0 else 1
    ranks = product(range(stages), range(world // (stages * tensor)), range(tensor))
    layers = [(0, 2), (1,)] if stages == 2 else [tuple(range(MOE_LAYERS))]
    return [Placement(index, stage == stages - 1, layers[stage]) for stage, index, _ in ranks]


def planned_of(rollouts: list[Rollout], case: Case, ranks: int) -> tuple[list[Packing], dict[str, float]]:
    mine = recipe(case.sampling, case.masks)
    rollout = mine.rollout.model_copy(update={"staleness": int(case.older)})
    mine = mine.model_copy(update={"rollout": rollout})
    minibatches, metrics = build_minibatches(rollouts, Job(mine))
    budget = 2 * LONGEST
    return [plan_rows(trees, budget, ranks, 1, case.rows) for trees in minibatches], metrics


def arrays_of(node: Node) -> Iterator[np.ndarray]:
    """Yield the arrays of a node that are here, without routes."""
    for name in node.tokens.columns.keys() - {"routes"}:
        column = node.tokens.only([name])
        if not column.is_bare:
            yield from column.arrays()


def same(value: Any, other: Any) -> bool:
    """Return True if both are equal bit for bit."""
    if isinstance(value, np.ndarray):
        return value.dtype == other.dtype and value.tobytes() == other.tobytes()
    if isinstance(value, dict):
        return value.keys() == other.keys() and all(same(value[name], other[name]) for name in value)
    return value == other


def try_cases(cases: list[Case]) -> list[int]:
    """Return the bytes that this rank received in each case; assert the other properties."""
    world, rank = dist.get_world_size(), dist.get_rank()
    exchange.TOKENS_AT_ONCE = 20
    received = []
    for case in cases:
        everything = rollouts_of(case.seed, case.sampling, case.masks, case.routes)
        rng = np.random.default_rng(case.seed)
        homes = np.zeros(len(everything)) if case.one_home else rng.integers(0, world, len(everything))
        part = [
            copy.deepcopy(rollout) for rollout, home in zip(everything, homes, strict=True) if home == rank
        ]
        placements = placements_of(world, case)
        placement = placements[rank]
        ranks = 1 + max(placement.data_parallel for placement in placements)
        known = rollouts_of_all_ranks(
            part, list({rollout.prompt_id: rollout.prompt for rollout in everything}.values())
        )
        expected, metrics = planned_of(everything, case, ranks)
        plans, found = planned_of(known, case, ranks)
        assert metrics == found
        received.append(0)
        for whole, plan in zip(expected, plans, strict=True):
            assert whole.metrics == plan.metrics
            before = held(plan)
            plan = exchange_tokens(plan, placements)
            check_held(plan, whole, placement, rank)
            assert held(plan) - before == lacked(whole, plan.forest.home, placement, rank)
            received[-1] += held(plan) - before
            plan, came = exchange_paths(plan, placements)
            assert came == lacked_routes(whole, plan.forest.home, placement, rank)
            whole, _ = exchange_paths(in_every_rank(whole), placements)
            rows = plan.rows(placement.data_parallel, placement.for_loss)
            wanted = [whole.fill(row, placement.for_loss) for row in whole.ranks[placement.data_parallel]]
            assert len(rows) == len(wanted)
            for row, full in zip(rows, wanted, strict=True):
                assert all(same(getattr(row, name), getattr(full, name)) for name in vars(full))
    return received


def held(plan: Packing) -> int:
    """Return the bytes of nodes' arrays."""
    return sum(array.nbytes for node in plan.forest.nodes for array in arrays_of(node))


def lacked(whole: Packing, home: np.ndarray, placement: Placement, rank: int) -> int:
    """Return the bytes that a rank's rows need and whose home is another rank: 4 of a token's id, 4 of its
    log-prob, 4 of its version if the loss reads it, and those of its mask. Every rank has the prompts."""
    needed, trained = whole.needed(placement.data_parallel)
    needed = needed[whole.forest.parent[needed] >= 0]
    apart = (home >= 0) & (home != rank)
    tokens = sum(4 * len(whole.forest.nodes[node]) for node in needed[apart[needed]])
    tables = [whole.forest.nodes[node].tokens for node in trained[apart[trained]]]
    kept = sum(table["kept"].values.nbytes + len(table) for table in tables if "kept" in table)
    loss = sum((8 if "versions" in table else 4) * len(table) for table in tables) + kept
    return tokens + (loss if placement.for_loss else 0)


def lacked_routes(whole: Packing, home: np.ndarray, placement: Placement, rank: int) -> int:
    """Return the bytes of this rank's layers, for the nodes that its rows need, prompts included."""
    needed, _ = whole.needed(placement.data_parallel)
    apart = needed[(home[needed] >= 0) & (home[needed] != rank)]
    tables = [whole.forest.nodes[node].tokens for node in apart]
    return sum(table["routes"][:, placement.moe_layers].nbytes for table in tables if "routes" in table)


def in_every_rank(plan: Packing) -> Packing:
    forest = plan.forest
    return replace(plan, forest=replace(forest, home=np.full_like(forest.home, -1)))


def check_held(plan: Packing, whole: Packing, placement: Placement, rank: int) -> None:
    """Assert that a node's arrays are here exactly if this is their home or its rows need them."""
    needed, trained = (set(nodes.tolist()) for nodes in whole.needed(placement.data_parallel))
    for number, node in enumerate(plan.forest.nodes):
        if node.parent < 0:
            continue  # every rank has the prompts
        tokens, loss = node.token_ids, node.tokens["logprobs"]
        assert isinstance(tokens, Placeholder) != (node.home == rank or number in needed)
        assert isinstance(loss, Placeholder) != (
            node.home == rank or (number in trained and placement.for_loss)
        )


def test_every_rank_fills_the_rows_of_full_rollouts_and_holds_no_other_arrays():
    @settings(max_examples=2, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(st.lists(cases, min_size=10, max_size=10))
    def check(cases):
        received = np.array(run_ranks(4, try_cases, cases))
        assert received.any()

    check()


# ---- an update -------------------------------------------------------------------------------------------


def whole_and_shared(folder: str, sections: dict[str, Any], one_home: bool) -> list[tuple[Any, dict]]:
    """Return metrics and weights after an update on all arrays, and after one on the arrays that this rank
    has."""
    world, rank = dist.get_world_size(), dist.get_rank()
    mine = recipe("equal_length", True, folder, **sections)
    start(mine.parallel, seed=1)
    everything = rollouts_of(5, "equal_length", masks=True)
    part = everything if one_home else everything[rank::world]
    part = [copy.deepcopy(rollout) for rollout in part if rank == 0 or not one_home]
    known = rollouts_of_all_ranks(part, [rollout.prompt for rollout in everything])
    results = []
    for rollouts in (everything, known):
        policy = Policy(Job(mine))
        metrics = policy.update(build_minibatches(rollouts, Job(mine))[0]).metrics
        gc.collect()
        assert not any(isinstance(item, Packing) for item in gc.get_objects()), "arrays outlive the update"
        results.append((metrics, weights_of(policy)))
    return results


@pytest.mark.parametrize(("layers", "one_home"), [
    slow({"tensor": 2}, False), ({"pipeline": 2}, False), ({}, True),
], ids=["tensor parallel", "pipeline", "servers"])  # fmt: skip
def test_an_update_is_the_same_bit_for_bit(folder, layers, one_home):
    """The update has masks, old and reference log-probs, and two minibatches."""
    sections = layout(2, **layers) | {"loss": {"kl_coef": 0.1, "epochs": 2, "minibatches": 2}}
    for (metrics, weights), (found, moved) in run_ranks(2, whole_and_shared, folder, sections, one_home):
        assert metrics["train/updates"] == 4
        assert metrics == found
        assert all(torch.equal(moved[name], weight) for name, weight in weights.items())


def with_a_bad_logprob(folder: str, sections: dict[str, Any]) -> tuple[float, list[str]]:
    """Run an update where the last rank's last rollout has a bad log-prob; return (skipped updates, log)."""
    world, rank = dist.get_world_size(), dist.get_rank()
    mine = recipe("equal_length", False, folder, **sections)
    start(mine.parallel, seed=1)
    everything = rollouts_of(5, "equal_length", masks=False)
    part = everything[rank::world]
    for sampled in part[-1].parts if rank == world - 1 else ():
        sampled.tokens["logprobs"][0] = np.nan
    messages = heard()
    known = rollouts_of_all_ranks(part, [rollout.prompt for rollout in everything])
    metrics = Policy(Job(mine)).update(build_minibatches(known, Job(mine))[0]).metrics
    return metrics["train/skipped_updates"], messages


def test_a_bad_number_is_named_on_whichever_rank_it_is(folder):
    sections = layout(2) | {"optimizer": {"lr": 1e-3, "max_skipped_updates": 9}}
    (skipped, messages), (also, _) = run_ranks(2, with_a_bad_logprob, folder, sections)
    assert skipped == also == 1
    assert all("token tree 'q2/1', node" in message for message in messages), messages
    assert all("the rollout_logprob of token 0 is nan" in message for message in messages), messages
