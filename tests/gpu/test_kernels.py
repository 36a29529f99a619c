"""Kernels for GPUs against a dense mask and a token-by-token recurrence, in bfloat16."""

import pytest
import torch

from megatron_eqlen.models.gated_delta_net import tree_convolution, tree_delta_rule
from megatron_eqlen.models.tree_attention import flex_tree_attention
from megatron_eqlen.models.tree_params import TreeParams
from tests.kit.tree_samples import visible
from tests.pure.test_tree_kernels import (
    ROWS,
    WHOLE_BLOCKS,
    activated,
    delta_inputs,
    dense_attention,
    naive_delta_rule,
    normal,
)

each_row = pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{len(row.nodes)}nodes{len(row.input_ids)}")


@each_row
@pytest.mark.parametrize(
    ("heads", "groups", "size", "flash"),
    [(4, 2, 64, False), (4, 1, 128, False), (4, 1, 256, False), (4, 2, 128, True)],
)
def test_attention_equals_the_dense_mask(row, heads, groups, size, flash):
    if flash:
        pytest.importorskip("flash_attn.cute")
    length = len(row.input_ids)
    q, k, v = (normal(i, 1, n, length, size, device="cuda") for i, n in enumerate((heads, groups, groups)))
    halves = [x.detach().to(torch.bfloat16).requires_grad_() for x in (q, k, v)]
    ours = flex_tree_attention(*halves, TreeParams.from_row(row, "cuda"), size**-0.5, flash)
    rounded = [x.detach().double().requires_grad_() for x in halves]
    reference = dense_attention(*rounded, visible(row))
    weights = normal(9, *reference.shape, device="cuda").detach()
    weights[:, :, row.num_tokens :] = 0
    mine = torch.autograd.grad((ours.double() * weights).sum(), halves)
    theirs = torch.autograd.grad((reference * weights).sum(), rounded)
    for a, b in zip((ours * (weights != 0), *mine), (reference * (weights != 0), *theirs), strict=True):
        assert (a.double() - b).norm() <= 1e-2 * b.norm()


def test_flex_kernel_compiles_once_for_all_rows():
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    compiled = []
    for row in WHOLE_BLOCKS:
        q, k, v = (normal(i, 1, 2, len(row.input_ids), 64, device="cuda").bfloat16() for i in range(3))
        flex_tree_attention(q, k, v, TreeParams.from_row(row, "cuda"), 0.125)
        compiled.append(counters["stats"]["unique_graphs"])
    assert compiled[0] == compiled[-1]


def assert_close(ours, reference, our_inputs, inputs, tokens, tolerance):
    """Compare values of the row's tokens, and the gradients of all inputs, in the norm."""
    weights = normal(9, *reference.shape).detach()
    weights[:, tokens:] = 0
    mine = torch.autograd.grad((ours.cpu().double() * weights).sum(), our_inputs)
    theirs = torch.autograd.grad((reference * weights).sum(), inputs)
    pairs = zip((ours.cpu() * (weights != 0), *mine), (reference * (weights != 0), *theirs), strict=True)
    for a, b in pairs:
        assert (a.cpu().double() - b).norm() <= tolerance * b.norm()


@each_row
def test_delta_rule_equals_the_recurrence(row):
    """fla's kernel is used if it is installed, else plain torch."""
    exact = [
        x.detach().bfloat16().double().requires_grad_() for x in delta_inputs(len(row.input_ids), 4, 64, 64)
    ]
    halves = [x.detach().to("cuda", torch.bfloat16).requires_grad_() for x in exact]
    ours = tree_delta_rule(*activated(*halves), TreeParams.from_row(row, "cuda"))
    reference = naive_delta_rule(*activated(*exact), row)
    assert_close(ours, reference, halves, exact, row.num_tokens, tolerance=2e-2)


@each_row
def test_convolution_follows_the_path(row):
    """fla's kernel is used if it is installed, else torch's."""
    exact = [normal(0, 1, len(row.input_ids), 64), normal(1, 64, 1, 4)]
    exact = [x.detach().bfloat16().double().requires_grad_() for x in exact]
    halves = [x.detach().to("cuda", torch.bfloat16).requires_grad_() for x in exact]
    ours = tree_convolution(*halves, TreeParams.from_row(row, "cuda"))
    reference = tree_convolution(*exact, TreeParams.from_row(row, "cpu"))
    assert_close(ours, reference, halves, exact, row.num_tokens, tolerance=1e-2)


@each_row
def test_a_second_layer_does_not_wait_for_the_gpu(row):
    """Any value read back from the device is an error here (fla caches little, and asks each time)."""
    halves = [x.detach().to("cuda", torch.bfloat16) for x in delta_inputs(len(row.input_ids), 4, 64, 64)]
    shapes = [(1, len(row.input_ids), 64), (64, 1, 4)]
    x, weight = (normal(i, *shape).to("cuda", torch.bfloat16) for i, shape in enumerate(shapes))
    tree = TreeParams.from_row(row, "cuda")
    for first in (True, False):
        torch.cuda.set_sync_debug_mode("default" if first else "error")
        try:
            tree_convolution(x, weight, tree)
            tree_delta_rule(*activated(*halves), tree)
        finally:
            torch.cuda.set_sync_debug_mode("default")
