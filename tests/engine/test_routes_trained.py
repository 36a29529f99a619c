"""From vLLM's routers to Megatron's: an update computes with the routes that a harvest kept."""

from __future__ import annotations

import copy

import pytest
from safetensors.torch import load_file

from megatron_eqlen.metrics import EXPERT_AGREEMENT, MISMATCH, MISMATCH_OF_COMPARED, ROUTER_AGREEMENT
from megatron_eqlen.objectives.build import build_minibatches
from megatron_eqlen.recipe import Recipe
from megatron_eqlen.rollout.harvest import harvest
from megatron_eqlen.rollout.harvest_plan import HarvestPlan
from megatron_eqlen.rollout.partial import RolloutOrigin
from megatron_eqlen.rollout.record.reader import read_progress
from megatron_eqlen.rollout.record.recorder import Recorder, record_grades
from megatron_eqlen.types import Grade, Metrics, Prompt, Rollout, rollout_key
from tests.kit.distributed import run_ranks
from tests.kit.rollout_kit import DTYPES, EOS, folder, open_engine
from tests.kit.updates import build_policy, layout
from tests.pure.test_rollout_harvest import make_recipe

PROMPTS = [Prompt(f"p{i}", [5 + i, 6, 7, 8] * 8, "?", "math", "1", number=i) for i in range(3)]
SECTIONS = {
    "sampling": "tree",  # forks wherever a step ends, and with the KL penalty all of it is trained
    "objective": "treerpo",
    "tree_sampling": {"branching": 2, "depth": 3},
    "rollout": {"max_response_length": 60, "max_num_seqs": 64, "keep_routes": True, "temperature": 1.0},
    "data": {"sources": [{"name": "s", "path": "none"}], "max_prompt_length": 32},
    "packing": {"max_tokens_per_row": 200},
    "loss": {"kl_coef": 0.1},
}


KINDS = {
    "equal_length": {"sampling": "equal_length", "objective": "grpo"},
    "independent": {"sampling": "independent", "objective": "grpo"},
    "tree": {},
}


def recipe_of(**changes) -> Recipe:
    return make_recipe(**SECTIONS | changes)


def graded(rollouts: list[Rollout]) -> list[Rollout]:
    """Grade every other response that ended as right."""
    for rollout in rollouts:
        for number, (segment, _) in enumerate(rollout.ended()):
            segment.grade = Grade(float(number % 2 == 0), "scored")
    return rollouts


def update(path: str, rollouts: list[Rollout], changes: dict) -> Metrics:
    minibatches, _ = build_minibatches(rollouts, recipe_of())
    return build_policy(path, SECTIONS | changes).update(minibatches)


@pytest.mark.parametrize(
    ("kind", "layers", "close"), [("qwen3_moe", {"pipeline": 2}, 1e-4), ("qwen3_next", {"tensor": 2}, 0.05)]
)
def test_the_trainer_computes_with_the_experts_that_the_engine_chose(kind, layers, close):
    """The trainer is in float32; the engine is in bfloat16 where vLLM's CPU build has nothing else."""
    engine = open_engine(folder(kind), DTYPES.get(kind, "float32"), temperature=1.0, keep_routes=True)
    try:
        rollouts = graded(harvest(engine, HarvestPlan(PROMPTS, recipe_of(), EOS, seed=3))[0])
    finally:
        engine.close()
    path = str(folder(kind))
    (found, _) = run_ranks(2, update, path, copy.deepcopy(rollouts), layout(2, **layers))
    assert found["train/updates"] == 1
    assert found[EXPERT_AGREEMENT] == 1.0
    assert found[ROUTER_AGREEMENT] > 0.97
    assert found[MISMATCH] < close
    without = {"loss": SECTIONS["loss"] | {"router_replay": False}}
    (free,) = run_ranks(1, update, path, rollouts, without)
    assert free[EXPERT_AGREEMENT] == free[ROUTER_AGREEMENT]
    assert found[MISMATCH] < 1.001 * free[MISMATCH]


def carried_over(kind: str) -> dict:
    """Return sections of a recipe whose first step ends after some tokens of each path."""
    rollout = SECTIONS["rollout"] | {"carry_over": True, "tokens_per_step": 150}
    return KINDS[kind] | {"rollout": rollout, "loss": {"kl_coef": 0.1, "rollout_is": "token"}}


def update_of_second_step(path: str, rollouts: list[Rollout], changes: dict) -> Metrics:
    """Return the metrics of an update whose policy, of version 1, has the weights at ``path``."""
    minibatches, _ = build_minibatches(rollouts, recipe_of(**changes), policy_version=1)
    policy = build_policy(path, SECTIONS | changes)
    policy.version = 1
    return policy.update(minibatches)


@pytest.mark.parametrize("kind", KINDS)
def test_new_tokens_of_a_carried_rollout_train_with_the_experts_that_their_prefix_got(kind, tmp_path):
    """Newer weights continue the rollouts of the first step: they prefill them again, with other experts."""
    changes = carried_over(kind)
    recipe, first_step = recipe_of(**changes), tmp_path / "step-00000000"
    whole = recipe_of(**changes | {"rollout": changes["rollout"] | {"tokens_per_step": 10**6}})
    engine = open_engine(folder("qwen3_moe"), temperature=1.0, keep_routes=True)
    try:
        with Recorder(first_step / "rank-0.arrow") as recorder:
            begun, _ = harvest(engine, HarvestPlan(PROMPTS, recipe, EOS, seed=3), [recorder])
        record_grades(first_step / "rank-0.arrow", graded(begun))
        origins = {rollout_key(rollout): RolloutOrigin(0) for rollout in begun if rollout.suspended}
        progress = read_progress(tmp_path / "step-00000001", PROMPTS, recipe, origins)
        assert sum(rollout.earlier_tokens for rollout in progress.partial) > 50
        engine.update_weights(load_file(folder("qwen3_moe", 1) / "model.safetensors").items(), 1)
        plan = HarvestPlan(PROMPTS, whole, EOS, seed=4, progress=progress, oldest_version=0)
        rollouts, measured = harvest(engine, plan)
    finally:
        engine.close()
    (found,) = run_ranks(1, update_of_second_step, str(folder("qwen3_moe", 1)), graded(rollouts), changes)
    assert found["train/updates"] == 1
    assert found["mismatch/compared_tokens"] > 50
    assert found[MISMATCH_OF_COMPARED] < 1e-4
    assert found[ROUTER_AGREEMENT] > 0.97
    assert measured["harvest/rerouted_tokens"] > 50
    assert measured["harvest/rerouted_agreement"] < 0.97
