"""An optimizer step with a number that is not finite is not taken, on any rank, wherever the number comes
from."""

import copy
import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_eqlen.packing.pack import RankRows
from megatron_eqlen.training import saved_state
from megatron_eqlen.training.finite import NonFiniteError
from tests.kit.distributed import run_ranks
from tests.kit.marks import slow
from tests.kit.updates import TWO_EPOCHS, build_policy, heard, layout, numbers, one_tree_a_row, same, save

TREES = one_tree_a_row(3)[:2]
NODE = f"{TREES[1].name!r}, node 2"
NAN = math.nan


# ---- faults: each changes a policy or the trees and returns how to take it back --------------------------


def in_a_tree(change):
    """Return the trees with a fault in one of them."""
    trees = copy.deepcopy(TREES)
    change(trees[1].nodes[2])
    return trees


def nan_logprob(node):
    node.tokens["logprobs"][1] = NAN


def in_a_column(policy, column, value):
    """Put a fault into a number of a row, after packing, on the rank that trains the tree."""
    read = RankRows.__getitem__

    def spoiled(rows, number):
        row = read(rows, number)
        at = [i for i, weight in enumerate(row.weights) if weight == TREES[1].nodes[2].weight]
        numbers = row.advantages if column == "advantages" else row.others.get(column)
        if at and numbers is not None:  # a stage before the last has none
            numbers[at[3]] = value
        return row

    RankRows.__getitem__ = spoiled
    return lambda: setattr(RankRows, "__getitem__", read)


def in_a_gradient(policy):
    """Put a fault into a gradient of the last rank alone."""
    if dist.get_rank() != dist.get_world_size() - 1:
        return lambda: None
    parameter = next(p for name, p in policy.chunks[0].named_parameters() if "linear_fc1" in name)
    return parameter.register_hook(lambda gradient: gradient * NAN).remove


def in_a_loss(policy):
    """Put a fault into a row's loss, on the pipeline stage that computes losses; the gradient stays
    finite."""
    loss = policy._loss

    def spoiled(logprobs, entropy, row, at, sampled_by):
        value, log = loss(logprobs, entropy, row, at, sampled_by)
        return value + (math.inf if TREES[1].nodes[2].weight in row.weights else 0.0), spoil(log)

    def spoil(log):
        log.metrics["loss/policy"] += math.inf
        return log

    policy._loss = spoiled
    return lambda: setattr(policy, "_loss", loss)


FAULTS = {
    "rollout_logprob": (lambda policy: None, in_a_tree(nan_logprob), NODE + ": the rollout_logprob"),
    "ref_logprob": (lambda p: in_a_column(p, "ref", NAN), TREES, NODE + ": ref_logprobs of"),
    "old_logprob": (lambda p: in_a_column(p, "old", NAN), TREES, NODE + ": old_logprobs of"),
    "late_advantage": (lambda p: in_a_column(p, "advantages", math.inf), TREES, "advantages of token"),
    "gradient": (in_a_gradient, TREES, "linear_fc1.weight on rank"),
    "loss": (in_a_loss, TREES, "row "),
}  # fmt: skip


def state_of(policy) -> list:
    """Return copies of everything that an update changes: numbers and the schedule."""
    return [*numbers(policy), torch.tensor([policy.version, policy.schedule.num_steps])]


ANYWHERE = {"old_logprob", "gradient", "loss"}
"""One fault of each source; the others of a source differ by the number alone, in any layout."""


def try_faults(folder: str, changes: dict, faults: set[str]) -> dict:
    """Return for each of ``faults`` (metrics, whether all stayed, what was logged, metrics of a good step
    after)."""
    policy = build_policy(folder, changes)
    policy.update([TREES])
    messages = heard()
    found = {}
    for name, (inject, trees, _) in FAULTS.items():
        if name not in faults:
            continue
        messages.clear()
        take_back = inject(policy)
        before = state_of(policy)
        faulty = policy.update([trees])
        unchanged = same(before, state_of(policy))
        assert faulty.mismatch is None
        if take_back is not None:
            take_back()
        found[name] = faulty.metrics, unchanged, list(messages), policy.update([TREES]).metrics
    return found


LAYOUTS = {"data parallel": layout(2), "pipeline": layout(2, pipeline=2)}


@pytest.mark.parametrize("name", [name if name == "data parallel" else slow(name) for name in LAYOUTS])
def test_nothing_changes_on_any_rank_and_the_next_good_step_is_taken(folder, name):
    changes = (
        TWO_EPOCHS | LAYOUTS[name] | {"optimizer": {"lr": 1e-4, "warmup_steps": 0, "max_skipped_updates": 2}}
    )
    faults = set(FAULTS) if name == "data parallel" else ANYWHERE
    ranks = run_ranks(2, try_faults, folder, changes, faults)
    for rank, found in enumerate(ranks):
        for fault, (metrics, unchanged, messages, after) in found.items():
            assert unchanged, f"{fault} changed rank {rank}"
            assert (metrics["train/updates"], metrics["train/skipped_updates"]) == (0, 2), fault
            assert "loss/policy" not in metrics, "numbers of a step that was not taken"
            assert (after["train/updates"], after["train/skipped_updates"]) == (2, 0), fault
            assert math.isfinite(after["loss/policy"])
            assert len(messages) == (2 if rank == 0 else 0), "said once for each update"
            assert all(FAULTS[fault][2] in message for message in messages), (fault, messages)


def until_the_end(folder: str, checkpoints: Path) -> tuple[str, int, bool]:
    """Save a checkpoint, then take faults to the end; return (the error, the step loaded, whether the state
    is the checkpoint's)."""
    policy = build_policy(
        folder, TWO_EPOCHS | layout(2) | {"optimizer": {"lr": 1e-4, "max_skipped_updates": 3}}
    )
    policy.update([TREES])
    save(checkpoints, 1, policy, {}, keep=2)
    good = state_of(policy)
    in_a_gradient(policy)
    policy.update([TREES])
    with pytest.raises(NonFiniteError) as error:
        policy.update([TREES])
    position = saved_state.load(checkpoints, policy)
    assert position is not None
    return str(error.value), position["step"], same(good, state_of(policy))


def test_after_some_in_a_row_the_run_ends_and_the_last_checkpoint_stands(folder, tmp_path):
    for error, step, unchanged in run_ranks(2, until_the_end, folder, tmp_path):
        assert "4 updates in a row could not be taken, optimizer.max_skipped_updates is 3" in error
        assert (step, unchanged) == (1, True)


def with_a_weight_that_is_no_number(folder: str) -> str:
    """Return the error of a policy whose last rank has a weight, of a token that nothing trains, that is not
    a number."""
    policy = build_policy(folder, layout(2))
    policy.check_weights()
    if dist.get_rank() == 1:
        next(policy.chunks[0].parameters()).data.view(-1)[-1] = NAN
    with pytest.raises(NonFiniteError) as error:
        policy.check_weights()
    return str(error.value)


def test_a_weight_that_is_not_finite_is_an_error_on_every_rank(folder):
    for error in run_ranks(2, with_a_weight_that_is_no_number, folder):
        assert error == "not finite: the weight embedding.word_embeddings.weight on rank 1"
