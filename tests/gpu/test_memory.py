"""On a GPU: parking frees the device's memory, the optimizer's keys take the bytes that they promise, and a
head in chunks a chunk's."""

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_eqlen.job import Job
from megatron_eqlen.models import groups
from megatron_eqlen.recipe import ParallelRecipe
from megatron_eqlen.training.head import Head
from megatron_eqlen.training.policy import Policy
from tests.kit.tiny_models import save_tiny
from tests.kit.updates import one_tree_a_row, recipe_of

LARGE = {"hidden_size": 512, "intermediate_size": 2048, "num_attention_heads": 8, "head_dim": 64}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("large")
    save_tiny(path, "qwen3", **LARGE)
    return str(path)


@pytest.fixture
def world() -> Iterator[None]:
    """Start a world of this process alone, with NCCL."""
    yield
    groups.stop()


def build(folder: str, park: str = "state", **optimizer: Any) -> Policy:
    recipe = recipe_of(
        folder,
        {
            "model": {"path": folder, "dtype": "bfloat16"},
            "rollout": {"max_response_length": 20, "temperature": 1.0, "park_trainer": park},
            "optimizer": {"lr": 1e-3, "warmup_steps": 0} | optimizer,
        },
    )
    groups.start(recipe.parallel, seed=1)
    return Policy(Job(recipe))


def numbers(policy: Policy) -> list[torch.Tensor]:
    found = [parameter for chunk in policy.chunks for parameter in chunk.parameters()]
    for part in policy.optimizer.chained_optimizers:
        for main, state in part.optimizer.state.items():
            found += [main, *(value for value in state.values() if isinstance(value, torch.Tensor))]
    return [tensor.detach().cpu() for tensor in found]


@pytest.mark.parametrize("park", ["state", "all"])
def test_parking_frees_what_it_says_and_brings_it_back_bit_for_bit(folder, world, park):
    policy = build(folder, park)
    policy.update([one_tree_a_row(3)])
    before, on_device, held = numbers(policy), policy.memory.on_device(), torch.cuda.memory_allocated()
    policy.park()
    kept = on_device["weights"] if park == "state" else 0
    freed = held - torch.cuda.memory_allocated()
    assert freed == pytest.approx(sum(on_device.values()) - kept, rel=0.02)
    policy.unpark()
    assert all(map(torch.equal, numbers(policy), before))
    policy.update([one_tree_a_row(3)])


@pytest.mark.parametrize(("optimizer", "bytes_of_a_parameter"), [
    ({}, 12), ({"offload": True}, 0), ({"precision": "bfloat16"}, 6),
], ids=["default", "offload", "precision"])  # fmt: skip
def test_the_optimizer_takes_the_bytes_that_its_keys_promise_and_trains(
    folder, world, optimizer, bytes_of_a_parameter
):
    if optimizer.get("precision") and find_spec("transformer_engine") is None:
        pytest.skip("needs Transformer Engine")
    policy = build(folder, **optimizer)
    before = [weight.clone() for _, weight in policy.weights()]
    on_device = policy.memory.on_device()
    per_parameter = 2 * on_device["optimizer"] / on_device["weights"]
    assert per_parameter == pytest.approx(bytes_of_a_parameter, rel=0.02)
    for _ in range(2):
        policy.park()
        policy.unpark()
        policy.update([one_tree_a_row(3)])
    assert not all(map(torch.equal, before, [weight for _, weight in policy.weights()]))


def test_a_head_in_chunks_takes_less_and_rounds_alike(world):
    """cuBLAS may take another kernel for another number of rows, so not bit for bit."""
    groups.start(ParallelRecipe(), seed=1)
    everyone = dist.group.WORLD
    assert everyone is not None
    labels = torch.zeros(8192, dtype=torch.int64, device="cuda")
    generator = torch.Generator(device="cuda").manual_seed(0)
    hidden = torch.randn(8192, 1024, generator=generator, device="cuda").bfloat16()
    weight = 0.02 * torch.randn(32768, 1024, generator=generator, device="cuda").bfloat16()
    results, peaks = [], []
    for chunk in (8192, 1024):
        inputs = [x.clone().requires_grad_() for x in (hidden, weight)]
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        out = Head(labels, None, None, 1.0, everyone, chunk)(*inputs)
        results.append([out[0].detach(), torch.autograd.grad(out[0].sum(), inputs)[0].float()])
        peaks.append(torch.cuda.max_memory_allocated() - before)
    logits = 8192 * 32768 * 2
    assert peaks[0] >= 2 * logits
    assert peaks[1] <= 2 * logits / 8 + (256 << 20) + 32768 * 1024 * (4 + 2 + 2) + 4 * 8192 * 1024 * 2
    (whole, whole_grad), (chunks, chunks_grad) = results
    assert float((chunks - whole).abs().max()) <= 0.05
    assert float((chunks_grad - whole_grad).abs().max()) <= 0.01
