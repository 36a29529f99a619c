"""fla's kernels, as the package calls them, in Triton's interpreter against plain torch in float64."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from megatron_eqlen.models import gated_delta_net
from megatron_eqlen.models.gated_delta_net import chunked_delta_rule, run_by_run_delta_rule, tree_convolution
from megatron_eqlen.models.tree_params import TreeParams
from megatron_eqlen.types import Row, TokenTree
from tests.gpuless import interpreter
from tests.kit.tree_samples import group, pack, stream

torch.set_num_threads(1)
TOLERANCE = 1e-2
"""Relative error of an output or gradient in bfloat16; plain torch has 3e-3."""


@pytest.fixture(scope="module", autouse=True)
def fla() -> Iterator[None]:
    """Run fla's kernels in the interpreter, with memory that holds NaN until it is written."""
    interpreter.install()
    import fla.modules.causal_conv1d
    import fla.ops.gated_delta_rule  # noqa: F401

    interpreter.adapt("fla.")
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def row(tree: TokenTree) -> Row:
    return pack([tree], 300, multiple_of=4)[0][0]


RNG = np.random.default_rng(0)
TREES = {"group": group(RNG, 40, [30, 70]), "stream": stream(RNG, 7, [5, 70, 3])}


def inputs(*shapes: tuple[int, ...]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the same numbers twice, as float64 and as bfloat16."""
    generator = torch.Generator().manual_seed(0)
    narrow = [torch.randn(shape, generator=generator).bfloat16() for shape in shapes]
    return [x.double().requires_grad_() for x in narrow], [x.requires_grad_() for x in narrow]


def errors(
    outputs: tuple[torch.Tensor, torch.Tensor],
    halves: list[torch.Tensor],
    exact: list[torch.Tensor],
    used: int,
) -> list[float]:
    """Return the relative errors of an output, [1, S, ...], and of its gradients. ``outputs``: ours, and the
    expected one; ``used`` positions count."""
    ours, expected = outputs
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    weights[:, used:] = 0
    mine = torch.autograd.grad((ours.double() * weights).sum(), halves)
    theirs = torch.autograd.grad((expected * weights).sum(), exact)
    pairs = [(ours * (weights != 0), expected * (weights != 0)), *zip(mine, theirs, strict=True)]
    return [float((a.detach().double() - b.detach()).norm() / b.detach().norm()) for a, b in pairs]


def activated(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor) -> Any:
    """Return the recurrence's inputs as ``TreeGatedDeltaNet`` makes them."""
    q, k = gated_delta_net._l2_norm(q), gated_delta_net._l2_norm(k)
    return q, k, v, -torch.nn.functional.softplus(gated_delta_net._wide(g)), beta.sigmoid()


@pytest.mark.parametrize("kind", TREES)
def test_flas_recurrence_and_all_its_gradients_are_those_of_the_reference(kind):
    """Two value heads of Qwen3-Next's size share a key head; a node reads its parent's state."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    trees = row(TREES[kind])
    length = len(trees.input_ids)
    keys, values, gates = (1, length, 1, 128), (1, length, 2, 128), (1, length, 2)
    exact, halves = inputs(keys, keys, values, gates, gates)
    tree = TreeParams.from_row(trees, "cpu")
    assert len(tree.run_levels) == {"group": 2, "stream": 4}[kind]
    q, k, *rest = activated(*halves)
    ours = run_by_run_delta_rule(q.bfloat16(), k.bfloat16(), *rest, tree, chunk_gated_delta_rule)
    expected = chunked_delta_rule(*activated(*exact), TreeParams.from_row(trees, "cpu"))
    measured = errors((ours, expected), halves, exact, trees.num_tokens)
    found = dict(zip(("out", "q", "k", "v", "g", "beta"), measured, strict=True))
    assert max(found.values()) < TOLERANCE, found


def test_flas_convolution_and_its_gradients_are_those_of_the_reference(monkeypatch):
    from fla.modules.causal_conv1d import causal_conv1d

    trees = row(TREES["group"])
    exact, halves = inputs((1, len(trees.input_ids), 64), (64, 1, 4))
    tree = TreeParams.from_row(trees, "cpu")
    expected = tree_convolution(*exact, tree)
    kernel = lambda x, weight: causal_conv1d(x, weight.squeeze(1))[0]  # noqa: E731
    monkeypatch.setattr(gated_delta_net, "_row_convolution", kernel)
    found = errors((tree_convolution(*halves, tree), expected), halves, exact, trees.num_tokens)
    assert max(found) < TOLERANCE, found


@triton.jit
def _sum(x, out, size: tl.constexpr):
    tl.store(out, tl.sum(tl.load(x + tl.arange(0, size))))


def test_the_interpreter_sums_bfloat16_numbers_and_not_their_bits():
    """Triton 3.7.1's own interpreter sums the bits."""
    x, out = torch.full((16,), 1.5).bfloat16(), torch.zeros(1)
    _sum[(1,)](x, out, 16)
    assert out.item() == 24.0
