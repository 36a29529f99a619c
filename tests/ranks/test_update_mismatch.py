"""Every rank knows the mismatch of an update's own tokens, and its worst token."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest

from tests.kit.distributed import run_ranks
from tests.kit.updates import build_policy, layout, one_tree_a_row

TREES = one_tree_a_row(3)
"""Trees with random log-probs: each row has another mismatch, each rank other rows."""


def with_old_tokens_off(folder: str, changes: dict) -> tuple:
    """Compare lines whose older tokens have other log-probs, train them, then some that have no others."""
    rollout = {"max_response_length": 20, "carry_over": True, "tokens_per_step": 1}
    rollout |= {"temperature": 1.0, "top_k": 0, "top_p": 1.0}
    policy = build_policy(folder, changes | {"rollout": rollout, "loss": {"rollout_is": "token"}})
    trees = copy.deepcopy(TREES)
    nodes = [node for tree in trees for node in tree.nodes[1:]]
    for node in nodes:
        versions = np.where(np.arange(len(node)) > 0, -3, 0)
        node.tokens = node.tokens.with_column("versions", versions)
        node.tokens["logprobs"][1:] -= 50.0
    (lines,) = policy.compare(trees).values()
    both = policy.update([trees])
    for node in nodes:
        node.tokens = node.tokens.with_column("versions", np.zeros(len(node), np.int64))
    old = policy.update([trees])
    return lines, both.metrics, both.worst, old.metrics, old.mismatch, old.worst


def test_tokens_of_older_weights_are_not_compared(folders):
    """With data parallelism no rank alone knows the mean."""
    ranks = run_ranks(2, with_old_tokens_off, str(folders / "qwen3"), layout(2))
    assert ranks[0] == ranks[1]
    lines, both, worst, old, none, no_token = ranks[0]
    assert lines.count == 3 * 4
    assert lines.mean < 20
    assert both["mismatch/compared_abs_diff"] < 20 < both["mismatch/logprob_abs_diff"]
    assert both["mismatch/compared_tokens"] == 3 * 4
    assert worst[1].startswith("token 0 of")
    assert (old["train/updates"], old["mismatch/compared_tokens"], none, no_token) == (1, 0, None, (-1.0, ""))


def with_one_token_off(folder: str, changes: dict) -> tuple:
    """Return the worst token of updates of all trees, then of updates without this token."""
    policy = build_policy(folder, changes)
    trees = copy.deepcopy(TREES)
    trees[1].nodes[3].tokens["logprobs"][2] -= 40.0
    return policy.update([trees[:1], trees[1:]]).worst, policy.update([TREES]).worst


def test_every_rank_knows_the_worst_token_of_all_updates(folders):
    """With a pipeline only the last stage has log-probs."""
    ranks = run_ranks(2, with_one_token_off, str(folders / "qwen3"), layout(2, pipeline=2))
    assert ranks[0] == ranks[1]
    worst, after = ranks[0]
    assert worst[1] == f"token 2 of node 3 of tree {TREES[1].name!r}"
    assert after[0] < 20 < worst[0]


def with_other_lines_off(folder: str, changes: dict) -> tuple:
    """Take an update beside drawn lines of which another function sampled one, then one that trains
    nothing, then one that trains these lines beside another."""
    policy = build_policy(folder, changes)
    lines = [replace(tree, name=str(number)) for number, tree in enumerate(copy.deepcopy(TREES))]
    before = policy.compare(lines)
    for node in lines[1].nodes[1:]:
        node.tokens = node.tokens.with_column("logprobs", node.tokens["logprobs"] - 50.0)
    after = policy.compare(lines)
    trained = policy.update([TREES], lines)
    return before, after, trained, policy.update([], lines), policy.update([lines], TREES[:1])


@pytest.mark.parametrize("pipeline", [1, 2])
def test_lines_that_are_not_trained_are_compared_too(folders, pipeline):
    """Each has its own sums, the same on every rank; they are compared also where nothing is trained."""
    ranks = run_ranks(2, with_other_lines_off, str(folders / "qwen3"), layout(2, pipeline=pipeline))
    assert ranks[0] == ranks[1]
    before, after, trained, idle, off = ranks[0]
    assert {**after, "1": before["1"]} == before
    assert after["1"].trainer == before["1"].trainer
    assert after["1"].engine == pytest.approx(before["1"].engine - 50 * after["1"].count)
    assert after["1"].count == sum(map(len, TREES[1].nodes[1:]))
    drawn, of_trained = (trained.metrics[f"mismatch/{name}_abs_diff"] for name in ("drawn", "logprob"))
    assert trained.mismatch == drawn > 10 > of_trained
    assert trained.worst.place.endswith("of tree '1'")
    assert idle.metrics["train/updates"] == 0
    assert idle.mismatch > 10
    drawn, of_trained = (off.metrics[f"mismatch/{name}_abs_diff"] for name in ("drawn", "logprob"))
    assert off.mismatch == of_trained > 10 > drawn
