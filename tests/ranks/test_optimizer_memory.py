"""Placement of the optimizer's state and the dtype of gradient sums: their effects on results and memory."""

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_eqlen.job import Job
from megatron_eqlen.processes import cores
from megatron_eqlen.training import saved_state
from megatron_eqlen.training.parking import storage_bytes
from megatron_eqlen.training.policy import Policy
from tests.kit.distributed import run_ranks
from tests.kit.marks import slow
from tests.kit.updates import build_policy, layout, one_tree_a_row, recipe_of, save

LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "DP 2": ("qwen3-short", {}),
    "TP 2": ("qwen3-short", {"tensor": 2}),
    "EP 2": ("qwen3_moe-short", {"expert": 2}),
}
HOST, DEVICE = {"lr": 1e-3, "offload": True}, {"lr": 1e-3}


def changes_of(folders: Path, name: str) -> tuple[str, dict[str, Any]]:
    family, parallel = LAYOUTS[name]
    folder = str(folders / family)
    return folder, layout(2, **parallel) | {"model": {"path": folder, "dtype": "bfloat16"}}


def main_weights(policy: Policy) -> list[torch.Tensor]:
    """Return this rank's main weights, float32, and moments, by parameter."""
    found = []
    for part in policy.optimizer.chained_optimizers:
        for group in part.param_groups:
            for parameter in group["params"]:
                state = part.state[parameter]
                found += [state.get("master_param", parameter), state["exp_avg"], state["exp_avg_sq"]]
    return [tensor.detach().clone() for tensor in found]


def weights(policy: Policy) -> list[torch.Tensor]:
    return [parameter.detach().clone() for chunk in policy.chunks for parameter in chunk.parameters()]


def held_on_host(policy: Policy) -> tuple[int, int]:
    """Return (bytes of memory under a host optimizer's main weights and moments, bytes that they need)."""
    found = []
    for part in policy.optimizer.chained_optimizers:
        host: Any = part.optimizer
        for parameter, state in host.state.items():
            main = host.param_to_inner_param[parameter]
            found += [main, state["master_param"], state["exp_avg"], state["exp_avg_sq"]]
    return storage_bytes(found), sum(
        tensor.nbytes for tensor in {id(tensor): tensor for tensor in found}.values()
    )


def policies(folder: str, changes: dict[str, Any], *optimizers: dict[str, Any]) -> list[Policy]:
    """Return one policy per optimizer, all in the groups of the first."""
    sections = [changes | {"optimizer": optimizer | {"warmup_steps": 0}} for optimizer in optimizers]
    first = build_policy(folder, sections[0])
    return [first, *(Policy(Job(recipe_of(folder, section))) for section in sections[1:])]


def train(policy: Policy, updates: int) -> float:
    """Train, parking before each update; return the last gradient norm."""
    norm = 0.0
    for _ in range(updates):
        policy.park()
        policy.unpark()
        norm = policy.update([one_tree_a_row(2)]).metrics["train/grad_norm"]
    return norm


def steps(policy: Policy) -> list[float]:
    """Return Adam's step of each parameter."""
    parts = policy.optimizer.chained_optimizers
    return [float(state["step"]) for part in parts for state in part.optimizer.state.values()]


def worst(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    """Return the largest difference of two tensors' elements, relative to the tensors' largest."""
    pairs = [(a.double(), b.double()) for a, b in zip(ours, theirs, strict=True) if a.numel()]
    return max(float((a - b).abs().max() / b.abs().max().clamp_min(1e-30)) for a, b in pairs)


def differences(folder: str, changes: dict[str, Any], updates: int) -> tuple[float, float, bool, bool]:
    """Compare updates on the host and on the device: (main weights, gradient norms, Adam's steps, a
    dtype)."""
    host, device = policies(folder, changes, HOST, DEVICE)
    norms = [train(policy, updates) for policy in (host, device)]
    mains = main_weights(host)
    return (
        worst(mains, main_weights(device)),
        abs(norms[0] / norms[1] - 1),
        steps(host) != steps(device),
        any(main.dtype != torch.float32 for main in mains),
    )


@pytest.mark.parametrize("name", ["DP 2", slow("EP 2")])
def test_updates_on_the_host_are_those_on_the_device(folders, name):
    """Two implementations of one formula in float32 differ by at most 1e-6 of the largest main weight."""
    for main, norm, *wrong in run_ranks(2, differences, *changes_of(folders, name), 2):
        assert main < 1e-6
        assert norm < 1e-6
        assert not any(wrong)


def go_over(folder: str, changes: dict[str, Any], checkpoints: str) -> list[str]:
    """Return the faults of policies on host and device that load what others saved, there and here."""
    host, device, on_device, on_host, again = policies(folder, changes, HOST, DEVICE, DEVICE, HOST, HOST)
    new, _ = held_on_host(on_host)
    wrong = []
    for saved, place in ((host, "host"), (device, "device")):
        train(saved, 1)
        saved.park()
        save(Path(checkpoints, place), 1, saved, {}, keep=1)
        saved.unpark()
    for saved, loaded, place in (
        (host, on_device, "host"),
        (device, on_host, "device"),
        (host, again, "host"),
    ):
        saved_state.load(Path(checkpoints, place), loaded)
        wrong += [] if same(saved, loaded) else [f"{place}: other numbers came back"]
        wrong += [] if set(steps(loaded)) == {1.0} else [f"{place}: {steps(loaded)} steps"]
    for loaded in (on_host, again):
        held, needed = held_on_host(loaded)
        wrong += (
            [] if held == needed == new else [f"{held} bytes held, {needed} needed, {new} when it was new"]
        )
    for policy in (host, again):
        train(policy, 1)
    return wrong + ([] if same(host, again) else ["another update after loading"])


def same(trained: Policy, loaded: Policy) -> bool:
    ours, theirs = ([*main_weights(policy), *weights(policy)] for policy in (trained, loaded))
    return steps(trained) == steps(loaded) and all(map(torch.equal, ours, theirs))


def test_a_checkpoint_goes_over_between_host_and_device_bit_for_bit(folders, tmp_path):
    folder, changes = changes_of(folders, "DP 2")
    assert run_ranks(2, go_over, folder, changes, str(tmp_path)) == [[], []]


def gradient_bytes(folder: str, changes: dict[str, Any]) -> list[tuple[float, int, float]]:
    """Return (gradients' bytes over weights', optimizer's bytes on the device, gradient norm) for gradients
    in float32, in bfloat16, and in bfloat16 with the optimizer on the host."""
    half = {"grad_dtype": "bfloat16"}
    return [
        (
            policy.memory.on_device()["gradients"] / policy.memory.on_device()["weights"],
            policy.memory.on_device()["optimizer"],
            policy.update([one_tree_a_row(2)]).metrics["train/grad_norm"],
        )
        for policy in policies(folder, changes, DEVICE, DEVICE | half, HOST | half)
    ]


@pytest.mark.parametrize("name", [slow("TP 2")])
def test_bfloat16_gradients_take_half_the_memory_and_their_norm_is_right_to_their_precision(folders, name):
    for full, device, host in run_ranks(2, gradient_bytes, *changes_of(folders, name)):
        assert (full[0], device[0], host[0]) == (2.0, 1.0, 1.0), "bytes of gradients over bfloat16 weights'"
        assert (device[1], host[1]) == (full[1], 0)
        # Two rows and two sums over ranks: each rounds an element by 2^-9 of it at most.
        assert (device[2], host[2]) == pytest.approx((full[2], full[2]), rel=4 * 2**-8)


def test_a_host_optimizer_computes_with_this_ranks_share_of_the_cores(monkeypatch):
    """Launchers give a rank one thread only."""
    from megatron_eqlen.training.optimizer import all_cores

    monkeypatch.setattr(cores, "usable_cores", lambda: 12)
    monkeypatch.delenv("SLURM_CPUS_PER_TASK", raising=False)
    before = torch.get_num_threads()
    for ranks, threads in (("4", 3), ("12", 1), ("100", 1)):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
        torch.set_num_threads(1)
        with all_cores():
            assert torch.get_num_threads() == threads
        assert torch.get_num_threads() == 1
    torch.set_num_threads(before)


def test_a_precision_that_needs_transformer_engine_is_refused_without_it(folders):
    if torch.cuda.is_available():
        pytest.skip("there may be one")
    folder, changes = changes_of(folders, "DP 2")
    with pytest.raises(
        RuntimeError, match=r"optimizer\.precision: bfloat16 needs a GPU and Transformer Engine"
    ):
        run_ranks(2, policies, folder, changes, DEVICE | {"precision": "bfloat16"})
