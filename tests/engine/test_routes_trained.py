"""From vLLM's routers to Megatron's: an update computes with the routes that a harvest kept."""

from __future__ import annotations

import copy

import pytest

from megatron_eqlen.harvest.harvest import harvest
from megatron_eqlen.harvest.harvest_plan import HarvestPlan
from megatron_eqlen.job import Job
from megatron_eqlen.objectives.build import build_minibatches
from megatron_eqlen.recipe import Recipe
from megatron_eqlen.types import Grade, Metrics, Prompt, Rollout
from tests.kit.delta_net import in_float32
from tests.kit.distributed import run_ranks
from tests.kit.rollout_kit import EOS, folder, open_engine
from tests.kit.updates import build_policy, layout
from tests.pure.test_rollout_harvest import make_recipe

PROMPTS = [Prompt(f"p{i}", [5 + i, 6, 7, 8] * 8, "?", "math", "1", number=i) for i in range(2)]
SECTIONS = {
    "sampling": "tree",  # forks wherever a step ends, and with the KL penalty all of it is trained
    "objective": "treerpo",
    "tree_sampling": {"branching": 2, "forks": 2},
    "rollout": {"max_response_length": 40, "max_num_seqs": 64, "keep_routes": True, "temperature": 1.0},
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
    minibatches, _ = build_minibatches(rollouts, Job(recipe_of()))
    return build_policy(path, SECTIONS | changes).update(minibatches).metrics


@pytest.mark.parametrize(("kind", "layers"), [("qwen3_moe", {"pipeline": 2}), ("qwen3_next", {"tensor": 2})])
def test_the_trainer_computes_with_the_experts_that_the_engine_chose(kind, layers):
    with in_float32():
        engine = open_engine(folder(kind), temperature=1.0, keep_routes=True)
        try:
            rollouts = graded(harvest(engine, HarvestPlan(PROMPTS, recipe_of(), EOS, seed=3))[0])
        finally:
            engine.close()
    path = str(folder(kind))
    (found, _) = run_ranks(2, update, path, copy.deepcopy(rollouts), layout(2, **layers))
    assert found["train/updates"] == 1
    assert found["mismatch/expert_agreement"] == 1.0
    assert found["mismatch/router_agreement"] > 0.97
    assert found["mismatch/logprob_abs_diff"] < 1e-4
    without = {"loss": SECTIONS["loss"] | {"router_replay": False}}
    (free,) = run_ranks(1, update, path, rollouts, without)
    assert free["mismatch/expert_agreement"] == free["mismatch/router_agreement"]
    if kind == "qwen3_moe":
        with pytest.raises(RuntimeError, match=r"routes of the model's \d MoE layers x \d .*, found 2 x 2"):
            run_ranks(1, update, str(folder("qwen3_next")), rollouts, {})
