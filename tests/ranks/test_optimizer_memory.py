"""Where the optimizer's state lies and how gradients are summed: what that changes, and what it does not."""

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_eqlen import cores
from megatron_eqlen.training import checkpoint
from megatron_eqlen.training.parking import storage_bytes
from megatron_eqlen.training.policy import Policy
from tests.kit.distributed import run_ranks
from tests.kit.updates import build_policy, layout, one_tree_a_row

LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "DP 2": ("qwen3", {}),
    "TP 2": ("qwen3", {"tensor": 2}),
    "VPP 2": ("qwen3", {"pipeline": 2, "virtual_pipeline": 2}),
    "EP 2": ("qwen3_moe", {"expert": 2}),
    "TP 2, DeltaNet": ("qwen3_next", {"tensor": 2}),
}
HOST, DEVICE = {"lr": 1e-3, "offload": True}, {"lr": 1e-3}


def changes_of(folders: Path, name: str) -> tuple[str, dict[str, Any]]:
    family, parallel = LAYOUTS[name]
    folder = str(folders / family)
    return folder, layout(2, **parallel) | {"model": {"path": folder, "dtype": "bfloat16"}}


def main_weights(policy: Policy) -> list[torch.Tensor]:
    """This rank's main weights, float32, and moments; by parameter."""
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
    """(bytes of the memory under a host optimizer's main weights and moments, bytes that they need)"""
    found = []
    for part in policy.optimizer.chained_optimizers:
        host: Any = part.optimizer
        for parameter, state in host.state.items():
            main = host.param_to_inner_param[parameter]
            found += [main, state["master_param"], state["exp_avg"], state["exp_avg_sq"]]
    return storage_bytes(found), sum(tensor.nbytes for tensor in {id(one): one for one in found}.values())


def loaded_on_host(folder: str, changes: dict[str, Any], load: str) -> tuple[int, int, int]:
    """What a host optimizer holds after loading and needs, and what one that has loaded nothing holds."""
    policy = build_policy(folder, changes | {"optimizer": HOST | {"warmup_steps": 0}})
    new, _ = held_on_host(policy)
    checkpoint.load(Path(load), policy)
    return *held_on_host(policy), new


def train(
    folder: str,
    changes: dict[str, Any],
    optimizer: dict[str, Any],
    load: str = "",
    save: str = "",
    updates: int = 2,
) -> tuple[list[torch.Tensor], list[torch.Tensor], list[float], float]:
    """(main weights and moments, weights, Adam's step counts, gradient norm) after some updates."""
    policy = build_policy(folder, changes | {"optimizer": optimizer | {"warmup_steps": 0}})
    if load:
        checkpoint.load(Path(load), policy)
    norm = 0.0
    for _ in range(updates):
        policy.park()
        policy.unpark()
        norm = policy.update([one_tree_a_row(3)])["train/grad_norm"]
    if save:
        policy.park()
        checkpoint.save(Path(save), 1, policy, {}, keep=1)
        policy.unpark()
    steps = [
        float(state["step"])
        for part in policy.optimizer.chained_optimizers
        for state in part.optimizer.state.values()
    ]
    return main_weights(policy), weights(policy), steps, norm


def worst(one: list[torch.Tensor], other: list[torch.Tensor]) -> float:
    """Largest difference of two tensors' elements, relative to the tensors' largest."""
    pairs = [(a.double(), b.double()) for a, b in zip(one, other, strict=True) if a.numel()]
    return max(float((a - b).abs().max() / b.abs().max().clamp_min(1e-30)) for a, b in pairs)


@pytest.mark.parametrize("name", LAYOUTS)
def test_updates_on_the_host_are_those_on_the_device(folders, name):
    """Two implementations of one formula in float32: 1e-6 of the largest main weight after 4 updates."""
    folder, changes = changes_of(folders, name)
    ours = run_ranks(2, train, folder, changes, HOST)
    for (mains, _, steps, norm), (expected, _, counted, expected_norm) in zip(
        ours, run_ranks(2, train, folder, changes, DEVICE), strict=True
    ):
        assert all(main.dtype == torch.float32 for main in mains)
        assert worst(mains, expected) < 1e-6
        assert (steps, norm) == (counted, pytest.approx(expected_norm, rel=1e-6))


@pytest.mark.parametrize(("first", "then"), [(HOST, DEVICE), (DEVICE, HOST), (HOST, HOST)])
@pytest.mark.parametrize(
    ("name", "resharding"), [("DP 2", "data_parallel"), ("EP 2", "data_parallel"), ("DP 2", "any")]
)
def test_a_checkpoint_goes_over_between_host_and_device_bit_for_bit(
    folders, tmp_path, name, resharding, first, then
):
    folder, changes = changes_of(folders, name)
    changes |= {"checkpoint": {"resharding": resharding}}
    saved = run_ranks(2, train, folder, changes, first, "", str(tmp_path))
    loaded = run_ranks(2, train, folder, changes, then, str(tmp_path), "", 0)
    for (mains, model, steps, _), (again, model_again, steps_again, _) in zip(saved, loaded, strict=True):
        assert all(map(torch.equal, [*mains, *model], [*again, *model_again]))
        assert steps == steps_again == [4.0] * len(steps)
    if then is HOST:
        for held, needed, new in run_ranks(2, loaded_on_host, folder, changes, str(tmp_path)):
            assert held == needed == new
    if first is then:
        went_on = run_ranks(2, train, folder, changes, first, "", "", 3)
        resumed = run_ranks(2, train, folder, changes, first, str(tmp_path), "", 1)
        for one, other in zip(went_on, resumed, strict=True):
            assert all(map(torch.equal, [*one[0], *one[1]], [*other[0], *other[1]]))
            assert one[2] == other[2]


def gradient_bytes(
    folder: str, changes: dict[str, Any], optimizer: dict[str, Any]
) -> tuple[float, int, float]:
    policy = build_policy(folder, changes | {"optimizer": optimizer | {"warmup_steps": 0}})
    on_device = policy.memory.on_device()
    norm = policy.update([one_tree_a_row(3)])["train/grad_norm"]
    return on_device["gradients"] / on_device["weights"], on_device["optimizer"], norm


@pytest.mark.parametrize("name", ["DP 2", "TP 2"])
def test_bfloat16_gradients_take_half_the_memory_and_their_norm_is_right_to_their_precision(folders, name):
    folder, changes = changes_of(folders, name)
    full = run_ranks(2, gradient_bytes, folder, changes, DEVICE)
    for offload in (False, True):
        options = DEVICE | {"grad_dtype": "bfloat16", "offload": offload}
        half = run_ranks(2, gradient_bytes, folder, changes, options)
        for (ratio, state, norm), (full_ratio, full_state, full_norm) in zip(half, full, strict=True):
            assert (ratio, full_ratio) == (1.0, 2.0), "bytes of gradients over those of bfloat16 weights"
            assert state == (0 if offload else full_state)
            assert norm == pytest.approx(full_norm, rel=0.02)


def test_a_host_optimizer_computes_with_this_ranks_share_of_the_cores(monkeypatch):
    """Launchers give a rank one thread."""
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


def test_what_needs_transformer_engine_is_refused_without_it(folders):
    if torch.cuda.is_available():
        pytest.skip("there may be one")
    folder, changes = changes_of(folders, "DP 2")
    with pytest.raises(
        RuntimeError, match=r"optimizer\.precision: bfloat16 needs a GPU and Transformer Engine"
    ):
        run_ranks(2, train, folder, changes, DEVICE | {"precision": "bfloat16"})
