"""With ``rollout.mismatch.then: skip`` an update whose mismatch is too large is not taken, on any rank."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from megatron_eqlen.training.agreement import MismatchError
from tests.kit.distributed import run_ranks
from tests.kit.marks import slow_but
from tests.kit.updates import TWO_EPOCHS, build_policy, layout, one_tree_a_row, weights_of

TREES = one_tree_a_row(3)
"""Trees with random log-probs: each row has another mismatch, each rank other rows."""


def around_the_mismatch(folder: str, changes: dict) -> dict:
    """Return the results of updates whose limit is 1% above and 1% below the mismatch of the trees."""
    still = TWO_EPOCHS | {"optimizer": {"lr": 1e-12, "warmup_steps": 0, "max_skipped_updates": 2}}
    policy = build_policy(folder, changes | still)
    recipe = policy.recipe
    policy.update([TREES])
    found = policy.mismatch
    assert found is not None

    def update(tolerance: float, then: str = "skip"):
        mismatch = recipe.rollout.mismatch.model_copy(update={"tolerance": tolerance, "then": then})
        rollout = recipe.rollout.model_copy(update={"mismatch": mismatch})
        policy.recipe = recipe.model_copy(update={"rollout": rollout})
        return policy.update([TREES])

    more, warned = update(1.01 * found), update(0.99 * found, "warn")
    before, version = weights_of(policy), policy.version
    less = update(0.99 * found)
    same = all(torch.equal(tensor, before[name]) for name, tensor in weights_of(policy).items())
    with pytest.raises(MismatchError, match="trainer and engine disagree: log-probs differ by") as error:
        update(0.99 * found)
    return {
        "mismatch": found,
        "taken": [metrics["train/updates"] for metrics in (more, warned, less)],
        "skipped": [metrics["train/skipped_updates"] for metrics in (more, warned, less)],
        "same": same and policy.version == version,
        "error": str(error.value),
    }


LAYOUTS = {
    "data parallel": layout(2),  # no rank alone knows the mean
    "pipeline": layout(2, pipeline=2),  # only the last stage has log-probs
}


@pytest.mark.parametrize("name", slow_but({"data parallel"}, LAYOUTS))
def test_all_ranks_decide_by_the_mean_over_all_tokens(folders, name):
    ranks = run_ranks(2, around_the_mismatch, str(folders / "qwen3"), LAYOUTS[name])
    assert ranks[0] == ranks[1]
    assert ranks[0]["taken"] == [2, 2, 0]
    assert ranks[0]["skipped"] == [0, 0, 2]
    assert ranks[0]["same"]
    assert "3 updates in a row could not be taken, optimizer.max_skipped_updates is 2" in ranks[0]["error"]


def with_old_tokens_off(folder: str, changes: dict) -> tuple:
    """Take an update whose older tokens have other log-probs, then one that has no others."""
    rollout = {
        "max_response_length": 20, "temperature": 1.0, "carry_over": True, "tokens_per_step": 1,
        "mismatch": {"then": "skip", "tolerance": 20.0},
    }  # fmt: skip
    policy = build_policy(folder, changes | {"rollout": rollout, "loss": {"rollout_is": "token"}})
    trees = copy.deepcopy(TREES)
    nodes = [node for tree in trees for node in tree.nodes[1:]]
    for node in nodes:
        versions = np.where(np.arange(len(node)) > 0, -3, 0)
        node.tokens = node.tokens.with_column("versions", versions)
        node.tokens["logprobs"][1:] -= 50.0
    both, worst = policy.update([trees]), policy.worst
    for node in nodes:
        node.tokens = node.tokens.with_column("versions", np.zeros(len(node), np.int64))
    old = policy.update([trees])
    return both, worst, old, policy.mismatch, policy.worst


@pytest.mark.parametrize("name", slow_but({"data parallel"}, LAYOUTS))
def test_tokens_of_older_weights_are_not_compared(folders, name):
    ranks = run_ranks(2, with_old_tokens_off, str(folders / "qwen3"), LAYOUTS[name])
    assert ranks[0] == ranks[1]
    both, worst, old, none, no_token = ranks[0]
    assert both["train/updates"] == 1, "it is not skipped for what older weights sampled"
    assert both["mismatch/compared_abs_diff"] < 20 < both["mismatch/logprob_abs_diff"]
    assert both["mismatch/compared_tokens"] == 3 * 4
    assert worst.token == 0
    assert (old["train/updates"], old["mismatch/compared_tokens"], none, no_token) == (1, 0, None, None)


def with_one_token_off(folder: str, changes: dict) -> tuple:
    """Return the worst token of updates of all trees, then of updates without this token."""
    policy = build_policy(folder, changes)
    trees = copy.deepcopy(TREES)
    trees[1].nodes[3].tokens["logprobs"][2] -= 40.0
    policy.update([trees[:1], trees[1:]])
    worst = policy.worst
    policy.update([TREES])
    return worst, policy.worst


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_rank_knows_the_worst_token_of_all_updates(folders, name):
    ranks = run_ranks(2, with_one_token_off, str(folders / "qwen3"), LAYOUTS[name])
    assert ranks[0] == ranks[1]
    worst, after = ranks[0]
    assert (worst.tree, worst.node, worst.token) == (TREES[1].name, 3, 2)
    assert worst.difference == pytest.approx(worst.trainer - worst.engine)
    assert worst.engine == pytest.approx(TREES[1].nodes[3].tokens["logprobs"][2] - 40.0)
    assert after.difference < 20 < worst.difference
