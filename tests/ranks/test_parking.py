"""A trainer that is parked between its updates computes bit for bit what one that is never parked
computes."""

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_eqlen.job import Job
from megatron_eqlen.recipe.phases import phases
from megatron_eqlen.training import saved_state
from megatron_eqlen.training.parking import memory_of
from megatron_eqlen.training.policy import Policy
from tests.kit.distributed import run_ranks
from tests.kit.marks import slow
from tests.kit.updates import build_policy, heard, layout, numbers, one_tree_a_row, recipe_of, same, save

LAYOUTS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "DP 2, float32": ("qwen3-short", "float32", {}),
    "DP 2, bfloat16": ("qwen3", "bfloat16", {}),
    "EP 2, bfloat16": ("qwen3_moe-short", "bfloat16", {"expert": 2}),
}


def changes_of(name: str, folders: Path, park: str) -> tuple[str, dict[str, Any]]:
    family, dtype, parallel = LAYOUTS[name]
    folder = str(folders / family)
    rollout = {"max_response_length": 20, "temperature": 1.0, "park_trainer": park}
    model = {"path": folder, "dtype": dtype, "megatron": {"overlap_grad_reduce": family == "qwen3"}}
    return folder, layout(2, **parallel) | {"model": model, "rollout": rollout}


def is_wired(policy: Policy) -> bool:
    """Return True if weights and gradients lie in Megatron's buffers, and its buckets are views of those."""
    return all(
        memory_of(parameter) == memory_of(buffer.param_data) == memory_of(bucket.param_data)
        and memory_of(parameter.main_grad) == memory_of(buffer.grad_data) == memory_of(bucket.grad_data)
        for chunk in policy.ddp_chunks
        for buffer in (*vars(chunk)["buffers"], *vars(chunk)["expert_parallel_buffers"])
        for bucket in buffer.buckets
        for parameter in bucket.params_list
    )


def park_between_updates(folder: str, changes: dict[str, Any]) -> list[str]:
    """Return the faults of a policy that is parked between updates, compared with one that is not."""
    kept, parked = build_policy(folder, changes), Policy(Job(recipe_of(folder, changes)))
    wrong = []
    for step in range(2):
        for _ in range(2):
            before = numbers(parked)
            sent = {name: tensor.clone() for name, tensor in parked.weights()}
            parked.park()
            parked.park()  # no effect
            with parked.memory.readable():
                wrong += [] if same(numbers(parked), before) else [f"unreadable while parked, step {step}"]
                wrong += [] if is_wired(parked) else [f"parameters were moved to be read, step {step}"]
            with parked.memory.weights.resident():
                again = {name: tensor.clone() for name, tensor in parked.weights()}
            wrong += [] if same([*sent.values()], [*again.values()]) else [f"other weights sent, step {step}"]
            parked.unpark()
            parked.unpark()
            wrong += [] if same(numbers(parked), before) else [f"not restored, step {step}"]
        wrong += [] if is_wired(parked) else [f"buffers are not shared any more, step {step}"]
        for policy in (kept, parked):
            policy.update([one_tree_a_row(2)])
        wrong += [f"no update, step {step}"] if same(numbers(parked), before) else []
        wrong += [] if same(numbers(kept), numbers(parked)) else [f"another update, step {step}"]
    return wrong


@pytest.mark.parametrize("name", ["DP 2, bfloat16", slow("EP 2, bfloat16")])
def test_a_parked_trainer_makes_the_same_updates_bit_for_bit(folders, name):
    folder, changes = changes_of(name, folders, "all")
    assert run_ranks(2, park_between_updates, folder, changes) == [[], []]


def parts_by_phase(folder: str, sections: dict[str, dict[str, Any]]) -> dict[str, dict[str, set[str]]]:
    """Return the trainer's parts that have bytes on the device, for each way of parking."""
    found = {}
    for park, changes in sections.items():
        policy = Policy(Job(recipe_of(folder, changes))) if found else build_policy(folder, changes)
        found[park] = parts_in_turn(policy)
    return found


def parts_in_turn(policy: Policy) -> dict[str, set[str]]:
    def parts() -> set[str]:
        return {part for part, count in policy.memory.on_device().items() if count}

    found = {"load": parts()}
    policy.update([one_tree_a_row(2)])
    policy.park()
    found["generate"] = parts()
    with policy.memory.weights.resident():
        found["sync"] = parts()
    found["evaluate"] = parts()
    policy.unpark()
    policy.update([one_tree_a_row(2)])
    return found | {"train": parts()}


@pytest.mark.parametrize("name", [slow("EP 2, bfloat16")])
def test_the_table_of_phases_says_what_has_bytes_on_the_device(folders, name):
    folder, _ = changes_of(name, folders, "none")
    sections = {park: changes_of(name, folders, park)[1] for park in ("none", "state", "all")}
    for found in run_ranks(2, parts_by_phase, folder, sections):
        for park, by_phase in found.items():
            table = {phase.name: set(phase.parts) for phase in phases(recipe_of(folder, sections[park]))}
            for phase, parts in by_phase.items():
                assert parts == table[phase] & {"weights", "gradients", "optimizer"}, (park, phase)


def save_parked(folder: str, changes: dict[str, Any], checkpoints: str) -> list[torch.Tensor]:
    policy = build_policy(folder, changes)
    policy.update([one_tree_a_row(2)])
    policy.park()
    save(Path(checkpoints), 1, policy, {}, keep=1)
    policy.unpark()
    policy.update([one_tree_a_row(2)])
    return numbers(policy)


def resume_parked(folder: str, changes: dict[str, Any], checkpoints: str) -> list[torch.Tensor]:
    policy = build_policy(folder, changes)
    saved_state.load(Path(checkpoints), policy)
    policy.park()
    policy.unpark()
    policy.update([one_tree_a_row(2)])
    return numbers(policy)


def test_a_checkpoint_of_a_parked_trainer_resumes_bit_for_bit(folders, tmp_path):
    folder, changes = changes_of("DP 2, float32", folders, "all")
    went_on = run_ranks(2, save_parked, folder, changes, str(tmp_path))
    resumed = run_ranks(2, resume_parked, folder, changes, str(tmp_path))
    for before, after in zip(went_on, resumed, strict=True):
        assert same(before, after)


def update_without_hooks(folder: str, changes: dict[str, Any]) -> list[str]:
    """Return the warnings of an update after torch has dropped the gradient accumulators, with Megatron's
    hooks on them. torch does so where a parameter's ``data`` takes another dtype, as where it moves to
    another device."""
    policy = build_policy(folder, changes)
    policy.update([one_tree_a_row(2)])
    for chunk in policy.chunks:
        for parameter in chunk.parameters():
            own = parameter.data
            parameter.data = own.double()
            parameter.data = own
    warnings = heard()
    policy.update([one_tree_a_row(2)])
    return warnings


def test_a_gradient_of_zero_is_reported(folders):
    folder, changes = changes_of("DP 2, float32", folders, "none")
    warnings = run_ranks(2, update_without_hooks, folder, changes)
    assert warnings == [["update 2: the gradient of every weight is exactly 0"], []]
