"""The LM head in chunks: the same numbers, a chunk's memory."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron_eqlen.models.groups import start, stop
from megatron_eqlen.packing.pack import plan_rows
from megatron_eqlen.recipe import ParallelRecipe
from megatron_eqlen.training import logprobs
from megatron_eqlen.training.forward import run_rows
from megatron_eqlen.training.head import Head
from tests.kit.allocations import peak_bytes
from tests.kit.distributed import run_ranks
from tests.kit.tiny_models import save_tiny
from tests.kit.tree_samples import forest, masked
from tests.kit.tree_training import build, gradients, weighted_sum

TOKENS, HIDDEN, VOCABULARY = 203, 64, 96
# TOKENS products are summed in another order: TOKENS roundings, at most. In bfloat16 the sums are in float32
# and each side rounds its result once, by 2^-9.
DTYPES = {"float64": TOKENS * 2**-53, "float32": TOKENS * 2**-24, "bfloat16": 2 * 2**-9 + TOKENS * 2**-24}


def everyone() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def head(chunk: int, with_masks: bool) -> Head:
    rng = np.random.default_rng(0)
    labels = rng.integers(0, VOCABULARY, TOKENS)
    if not with_masks:
        return Head(torch.from_numpy(labels), None, None, 0.6, everyone(), chunk)
    kept = [np.unique([label, *rng.integers(0, VOCABULARY, rng.integers(0, 6))]) for label in labels]
    counts = np.array([len(ids) for ids in kept])
    mask = torch.from_numpy(np.concatenate(kept)), torch.from_numpy(counts), None
    ends = np.cumsum([0, *counts])
    return Head(torch.from_numpy(labels), mask, ends, 0.6, everyone(), chunk)


def through_the_head(name: str, chunk: int, with_masks: bool) -> list[torch.Tensor]:
    """Return [log-probs and entropy, gradients of the hidden states and of this rank's weight]."""
    generator = torch.Generator().manual_seed(1)
    dtype = getattr(torch, name)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator).to(dtype).requires_grad_()
    whole = torch.randn(VOCABULARY, HIDDEN, generator=generator).to(dtype)
    weight = whole.chunk(dist.get_world_size())[dist.get_rank()].clone().requires_grad_()
    out = head(chunk, with_masks)(hidden, weight)
    slope = torch.randn(TOKENS, generator=generator).to(out.dtype)
    (out[0] * slope).sum().backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    return [out.detach(), hidden.grad, weight.grad]


def differences() -> None:
    """Compare chunks with the whole row, on each rank."""
    for name, with_masks in product(DTYPES, (False, True)):
        compare(name, with_masks)


def compare(name: str, with_masks: bool) -> None:
    whole, exact = through_the_head(name, TOKENS, with_masks), None
    for chunk in (16, 64, 200):
        outputs, hidden, weight = through_the_head(name, chunk, with_masks)
        assert torch.equal(outputs, whole[0]), (name, with_masks, chunk)
        assert torch.equal(hidden, whole[1]), (name, with_masks, chunk)
        exact = through_the_head("float64", TOKENS, with_masks)[2] if exact is None else exact
        assert (weight.double() - whole[2].double()).norm() <= DTYPES[name] * exact.norm(), (name, chunk)
    same = through_the_head(name, TOKENS, with_masks)
    assert all(torch.equal(a, b) for a, b in zip(same, whole, strict=True)), "the whole row repeats itself"


@pytest.mark.parametrize("world", [1, 2])
def test_chunks_change_no_bit_of_logprobs_entropy_and_hidden_gradients(world):
    """The weight's gradient is summed in another order: equal up to round-off."""
    run_ranks(world, differences)


def peaks() -> list[int]:
    """Return the bytes for a forward and backward pass of 4,096 tokens: whole, and in chunks of 256; forward
    alone."""
    logprobs.CPU_ELEMENTS = 1 << 14
    labels = torch.zeros(4096, dtype=torch.int64)
    hidden, weight = torch.randn(4096, 16).bfloat16(), torch.randn(2048, 16).bfloat16()

    def run(chunk: int, train: bool) -> None:
        module = Head(labels, None, None, 1.0, everyone(), chunk)
        if not train:
            with torch.no_grad():
                module(hidden, weight)
            return
        inputs = [x.requires_grad_() for x in (hidden.clone(), weight.clone())]
        torch.autograd.grad(module(*inputs)[0].sum(), inputs)

    run(256, True)  # the first call starts what stays
    return [peak_bytes(run, *args) for args in ((4096, True), (256, True), (256, False))]


def test_the_peak_is_a_chunks_and_not_the_rows():
    """A chunk's logits and their gradient are in bfloat16, with two blocks of float32, beside hidden states,
    the weight and its float32 gradient."""
    whole, chunked, forward = run_ranks(1, peaks)[0]
    logits, blocks = 2048 * 2 * 4096, 2 * 4 * (1 << 14)
    others = 5 * 4096 * 16 * 2 + 4096 * 8 * 8 + 2048 * 16 * (2 + 4 + 2 + 2)
    assert whole >= 2 * logits
    assert chunked <= 2 * logits * 256 / 4096 + blocks + others
    assert forward <= logits * 256 / 4096 + blocks + 4096 * 8 * 8


def train(folder: Path, layers: dict, with_masks: bool) -> None:
    """Compare, on each rank, a real model with its head in chunks with the whole row."""
    parallel = ParallelRecipe(**layers)
    start(parallel, seed=1)
    model = build(folder, parallel)
    rows = plan_rows(masked(forest(3)) if with_masks else forest(3), 400, 1, 2).rows(0)
    results = []
    for chunk in (None, 64):
        for part in model:
            part.zero_grad_buffer()
        logs = run_rows(model, rows, 1.0, weighted_sum, train=True, logits_chunk=chunk)
        passed = run_rows(model, rows, 1.0, lambda p, *_: p.numpy(), train=False, logits_chunk=chunk)
        results.append((logs, passed, gradients(model)))
    (whole, whole_passed, expected), (ours, passed, found) = results
    assert [loss for loss, _ in ours] == [loss for loss, _ in whole]
    for (_, mine), theirs, (_, reference), again in zip(ours, passed, whole, whole_passed, strict=True):
        assert np.array_equal(mine, reference)
        assert np.array_equal(mine, theirs)
        assert np.array_equal(reference, again)
    for name, gradient in expected.items():
        if name in ("lm_head.weight", "model.embed_tokens.weight"):
            torch.testing.assert_close(found[name], gradient, rtol=1e-10, atol=1e-13)
        else:
            assert torch.equal(found[name], gradient), name
    stop()


@pytest.mark.parametrize(("layers", "tied", "with_masks"), [
    ({"tensor": 2, "sequence": True}, True, False),
    ({"tensor": 2, "sequence": False}, False, True),
    ({"pipeline": 2}, True, True),
])  # fmt: skip
def test_a_model_trains_the_same_in_chunks(tmp_path, layers, tied, with_masks):
    """Equal bit for bit, except for the gradient of the head's own weight (and of embeddings that are tied to
    it)."""
    save_tiny(tmp_path, "qwen3", num_hidden_layers=2, tie_word_embeddings=tied)
    run_ranks(2, train, tmp_path, layers, with_masks)
