"""Compatibility of layouts and checkpoints, and saving in the background."""

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from megatron_eqlen.models import checkpoint_folder
from megatron_eqlen.models.checkpoint_folder import CheckpointError
from megatron_eqlen.training import saved_state
from megatron_eqlen.training.policy import Policy
from tests.kit.distributed import run_ranks
from tests.kit.marks import slow, weekly_but
from tests.kit.tiny_models import save_tiny
from tests.kit.updates import build_policy, layout, numbers, one_tree_a_row, same, save


def policy_of(folder: str, processes: int, parallel: dict[str, Any]) -> Policy:
    parallel = dict(parallel)
    overlapped = {"overlap_grad_reduce": parallel.pop("overlapped", False)}
    model = {"path": folder, "dtype": "bfloat16", "megatron": overlapped}
    return build_policy(folder, layout(processes, **parallel) | {"model": model})


def carry_on(
    folder: str, processes: int, parallel: dict[str, Any], source: str, updates: int, target: str = ""
) -> str:
    """Load ``source``, if any, update, and save to ``target``, if any; return the error, if any."""
    policy = policy_of(folder, processes, parallel)
    if source:
        try:
            saved_state.load(Path(source), policy)
        except CheckpointError as error:
            return str(error)
    for _ in range(updates):
        policy.update([one_tree_a_row(2)])
    policy.park()
    if target:
        empty = torch.empty  # Megatron pads buckets with what lies in memory
        with patch.object(torch, "empty", lambda *sizes, **options: empty(*sizes, **options).zero_()):
            save(Path(target), 1, policy, {}, keep=1)
    return ""


def tensors(*folders: str) -> list[dict[str, torch.Tensor]]:
    """Return all tensors of checkpoints, whole, by Megatron's names."""
    (found,) = run_ranks(1, plain_tensors, *folders)
    assert all(any("exp_avg_sq" in name for name in each) for each in found)
    return found


def plain_tensors(*folders: str) -> list[dict[str, torch.Tensor]]:
    from megatron.core import dist_checkpointing

    steps = [step for folder in folders for step in checkpoint_folder.steps(Path(folder))]
    loaded = [dist_checkpointing.load_plain_tensors(str(step)) for step in steps]
    return [
        {name: tensor for name, tensor in each.items() if isinstance(tensor, torch.Tensor)} for each in loaded
    ]


SAME_BUCKETS = {
    "DP 2 -> DP 3": ("qwen3-short", 2, {}, 3, {}),
    "overlapped buckets, DP 2 -> DP 1": (
        "qwen3", 2, {"overlapped": True}, 1, {"overlapped": True}
    ),
    "EP 2 -> EP 2, expert DP 2": ("qwen3_moe-short", 2, {"expert": 2}, 4, {"expert": 2}),
}  # fmt: skip
OTHER_BUCKETS = {
    "DP 2 -> PP 2": ("qwen3-short", 2, {}, 2, {"pipeline": 2}, "parallel.pipeline 1 (now 2)"),
    "PP 2 -> PP 2, uneven": (
        "qwen3", 2, {"pipeline": 2}, 2, {"pipeline": 2, "layers_per_stage": [3, 1]},
        "parallel.layers_per_stage None (now [3, 1])",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def saved(folders, tmp_path_factory) -> Callable[[str, int, dict[str, Any]], tuple[str, str]]:
    """Return (model, its checkpoint) of ranks after an update; each layout's is written once, and only to be
    read."""
    made: dict[str, tuple[str, str]] = {}

    def saved(family: str, processes: int, parallel: dict[str, Any]) -> tuple[str, str]:
        if (key := f"{family} {processes} {parallel}") not in made:
            made[key] = str(folders / family), str(tmp_path_factory.mktemp("saved"))
            run_ranks(processes, carry_on, made[key][0], processes, parallel, "", 1, made[key][1])
        return made[key]

    return saved


@pytest.mark.parametrize("name", weekly_but({"DP 2 -> DP 3", "EP 2 -> EP 2, expert DP 2"}, SAME_BUCKETS))
def test_a_checkpoint_is_read_by_any_number_of_data_parallel_ranks(saved, tmp_path, name):
    *before, others, other_parallel = SAME_BUCKETS[name]
    folder, source = saved(*before)
    run_ranks(others, carry_on, folder, others, other_parallel, source, 0, str(tmp_path))
    expected, found = tensors(source, str(tmp_path))
    assert expected.keys() == found.keys()
    assert all(torch.equal(found[key], value) for key, value in expected.items())


@pytest.mark.parametrize("name", weekly_but({"DP 2 -> PP 2"}, OTHER_BUCKETS))
def test_another_layout_refuses_a_checkpoint(saved, tmp_path, name):
    *before, others, other_parallel, difference = OTHER_BUCKETS[name]
    folder, source = saved(*before)
    for refusal in run_ranks(others, carry_on, folder, others, other_parallel, source, 0, str(tmp_path)):
        assert f"step-00000001: was saved with {difference}" in refusal
        assert "begin a run with model.path: the export of this one" in refusal


def test_a_stage_without_experts_has_their_steps_and_continues_bit_for_bit(tmp_path):
    folder, parallel = str(tmp_path / "hf"), {"pipeline": 2}
    save_tiny(tmp_path / "hf", "glm4_moe", num_hidden_layers=2, first_k_dense_replace=1)
    source, through, again = (str(tmp_path / name) for name in "abc")
    run_ranks(2, carry_on, folder, 2, parallel, "", 1, source)
    run_ranks(2, carry_on, folder, 2, parallel, "", 2, through)
    run_ranks(2, carry_on, folder, 2, parallel, source, 1, again)
    expected, found = tensors(through, again)
    assert any(".experts." in name for name in expected)
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_every_rank_writes_its_share_of_a_checkpoint(folders, tmp_path):
    folder = str(folders / "qwen3")
    run_ranks(2, carry_on, folder, 2, {}, "", 1, str(tmp_path))
    (step,) = checkpoint_folder.steps(tmp_path)
    sizes = [sum(file.stat().st_size for file in step.glob(f"__{rank}_*")) for rank in range(2)]
    weights = (folders / "qwen3" / "model.safetensors").stat().st_size // 2  # float32 there
    half = 12 / 2 * weights / 2  # of main weights and moments; torch's headers come on top
    assert half < sizes[1] < 1.2 * half
    assert weights < sizes[0] - sizes[1] < 1.5 * weights, "the weights besides"


def hold_writers(until: threading.Event, fails_on: int | None = None) -> None:
    """Let this rank's writer wait, and fail on one rank."""
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

    write = FileSystemWriterAsync.write_preloaded_data_multithread

    def held(*arguments: Any, **options: Any) -> None:
        assert until.wait(60)
        if dist.get_rank() == fails_on:
            raise OSError(28, "No space left on device")
        write(*arguments, **options)

    FileSystemWriterAsync.write_preloaded_data_multithread = staticmethod(held)


def save_while_generating(folder: str, checkpoints: str, park: str, offload: bool) -> list[str]:
    """Return the faults of a save that runs while weights are sent."""
    rollout = {"max_response_length": 20, "temperature": 1.0, "park_trainer": park}
    sections = {"rollout": rollout, "optimizer": {"lr": 1e-3, "warmup_steps": 0, "offload": offload}}
    model = {"path": folder, "dtype": "bfloat16"}
    policy, go = build_policy(folder, layout(2) | sections | {"model": model}), threading.Event()
    save(Path(checkpoints), 1, policy, {}, keep=2)
    policy.update([one_tree_a_row(2)])
    saved = numbers(policy)
    policy.park()
    hold_writers(go)
    saving = saved_state.begin(Path(checkpoints), 2, policy, {}, keep=2)
    assert saving is not None
    with policy.memory.weights.resident():
        sent = sum(tensor.numel() for _, tensor in policy.weights())
    latest = checkpoint_folder.latest(Path(checkpoints))
    wrong = [] if latest and latest.name == "step-00000001" else [f"in force too early: {latest}"]
    go.set()
    size = saving.finish()["checkpoint/bytes"]
    step = checkpoint_folder.latest(Path(checkpoints))
    assert step is not None
    files = sum(file.stat().st_size for file in step.iterdir() if file.name != checkpoint_folder.MANIFEST)
    wrong += [] if size == files and sent else [f"{size} bytes, not {files}"]
    policy.unpark()
    policy.update([one_tree_a_row(2)])
    saved_state.load(Path(checkpoints), policy)
    return wrong + (
        [] if same(numbers(policy), saved) and step.name == "step-00000002" else ["other numbers came back"]
    )


@pytest.mark.parametrize(("park", "offload"), [slow("all", False), slow("state", True)])
def test_a_save_in_the_background_is_in_force_when_it_is_whole(folders, tmp_path, park, offload):
    folder = str(folders / "qwen3")
    assert run_ranks(2, save_while_generating, folder, str(tmp_path), park, offload) == [[], []]


def fail_on_rank_1(folder: str, checkpoints: str) -> tuple[str, list[str]]:
    policy, go = policy_of(folder, 2, {}), threading.Event()
    save(Path(checkpoints), 1, policy, {}, keep=2)
    hold_writers(go, fails_on=1)
    saving = saved_state.begin(Path(checkpoints), 2, policy, {}, keep=2)
    assert saving is not None
    go.set()
    try:
        saving.finish()
    except ValueError as error:
        dist.barrier()
        return str(error), sorted(path.name for path in Path(checkpoints).iterdir())
    return "", []


def test_a_save_that_fails_on_one_rank_fails_on_all_and_leaves_the_one_before(folders, tmp_path):
    for message, left in run_ranks(2, fail_on_rank_1, str(folders / "qwen3"), str(tmp_path)):
        assert "step-00000002: could not be written: [Errno 28] No space left on device" in message
        assert left == ["latest", "step-00000001"]


def die_while_generating(folder: str, checkpoints: str) -> None:
    policy = policy_of(folder, 1, {})
    save(Path(checkpoints), 1, policy, {}, keep=2)
    hold_writers(threading.Event())
    saved_state.begin(Path(checkpoints), 2, policy, {}, keep=2)
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_rank_that_is_killed_while_it_writes_leaves_the_checkpoint_before(folders, tmp_path):
    folder = str(folders / "qwen3")
    with pytest.raises(RuntimeError, match="died without an answer"):
        run_ranks(1, die_while_generating, folder, str(tmp_path))
    assert (tmp_path / "latest").read_text() == "step-00000001\n"
    run_ranks(1, carry_on, folder, 1, {}, str(tmp_path), 0)
    assert [path.name for path in checkpoint_folder.steps(tmp_path)] == ["step-00000001"]
