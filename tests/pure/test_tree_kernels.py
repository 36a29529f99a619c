"""Attention and Gated DeltaNet on trees against a dense mask and a token-by-token recurrence, in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import sympy
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._inductor.sizevars import SizeVarAllocator
from torch.nn.attention.flex_attention import flex_attention
from torch.utils._sympy.functions import Mod

from megatron_eqlen.models import tree_attention
from megatron_eqlen.models.gated_delta_net import chunked_delta_rule, run_by_run_delta_rule, tree_convolution
from megatron_eqlen.models.tree_attention import (
    BLOCK,
    block_visibility,
    flex_tree_attention,
    merged_attention,
    tree_block_mask,
    whole_block_attention,
)
from megatron_eqlen.models.tree_params import TreeParams
from megatron_eqlen.training.forward import row_multiple
from megatron_eqlen.types import Row, RowNode
from tests.kit.marks import examples
from tests.kit.tree_samples import any_tree, forest, group, pack, paths, stream, visible

torch.set_num_threads(1)


def rows(budget: int = 300, multiple_of: int = 4, **options) -> list[Row]:
    return pack(forest(0), budget, multiple_of=multiple_of, **options)[0]


ROWS = rows() + rows(260, 260)[:1] + rows(layout="expanded")[:2] + pack([], 8, multiple_of=8)[0]

WHOLE_BLOCKS = [row for budget in (384, 640, 1024) for row in rows(budget, budget)]
"""Rows of one block alone would have a kernel of their own: sizes of 1 are special to torch.compile."""


@pytest.fixture(params=ROWS, ids=lambda row: f"{len(row.nodes)}nodes{len(row.input_ids)}")
def row(request) -> Row:
    return request.param


def normal(seed: int, *shape: int, device: str = "cpu") -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator).to(device).requires_grad_()


def dense_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: np.ndarray) -> torch.Tensor:
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~torch.from_numpy(mask).to(q.device), float("-inf"))
    return scores.softmax(-1) @ v


def assert_equal_with_gradients(ours, reference, inputs, used: int, tolerance: float) -> None:
    """Compare outputs [.., used, ..] on dimension 2, and the gradients of a random weighted sum of them."""
    weights = normal(9, *reference.shape).detach().to(reference.device)
    assert ours.shape == reference.shape
    torch.testing.assert_close(ours[:, :, :used], reference[:, :, :used], rtol=tolerance, atol=tolerance)
    gradients = [
        torch.autograd.grad((out * weights)[:, :, :used].sum(), inputs, retain_graph=True, allow_unused=True)
        for out in (ours, reference)
    ]
    for mine, theirs in zip(*gradients, strict=True):
        assert mine is not None, "every input stays in the graph, also in a row of padding"
        expected = torch.zeros_like(mine) if theirs is None else theirs
        torch.testing.assert_close(mine, expected, rtol=tolerance, atol=tolerance)


def assert_merged_parts_are_the_rule(row: Row, heads: int, groups: int, size: int) -> None:
    length = len(row.input_ids)
    q, k, v = (normal(i, length, n, size) for i, n in enumerate((heads, groups, groups)))
    ours = merged_attention(q, k, v, TreeParams.from_row(row, "cpu"), size**-0.5)
    reference = dense_attention(*(x.transpose(0, 1)[None] for x in (q, k, v)), visible(row))
    ours = ours.transpose(0, 1)[None]
    assert_equal_with_gradients(ours, reference, [q, k, v], row.num_tokens, 1e-12)


@pytest.mark.parametrize(("heads", "groups", "size"), [(4, 2, 8), (2, 1, 256)])
def test_merged_parts_equal_the_dense_mask(row, heads, groups, size):
    assert_merged_parts_are_the_rule(row, heads, groups, size)


ANY_TREES = {
    "seed": st.integers(0, 2**32 - 1),
    "counts": st.lists(st.integers(1, 14), min_size=1, max_size=4),
    "longest": st.sampled_from([2, 5, 40]),
}


@examples(15)
@given(**ANY_TREES)
def test_merged_parts_of_any_trees_equal_the_dense_mask(seed, counts, longest):
    rng = np.random.default_rng(seed)
    for row in pack([any_tree(rng, count, longest) for count in counts], 14 * 40)[0]:
        assert_merged_parts_are_the_rule(row, heads=4, groups=2, size=8)


def test_streams_and_groups_take_two_calls():
    """A trunk is one piece of its row, so a fork's prefix is one span, however many streams a row has."""
    rng = np.random.default_rng(0)
    trees = [stream(rng, 7, [5, 70, 3, 1]), group(rng, 5, [8, 66, 2]), stream(rng, 3, [2, 4, 1])]
    (row,) = pack(trees, 400)[0]
    own, above = TreeParams.from_row(row, "cpu").calls
    assert own.causal
    assert not above.causal
    assert len(own.pairs) == 1 + 4 + 3 + 1 + 3 + (row.num_tokens < len(row.input_ids))
    assert len(above.pairs) == 4 + 2 + 3


def test_chains_cover_the_row_once(row):
    chains = TreeParams.from_row(row, "cpu").chains
    assert [at for chain in chains for at in range(chain.start, chain.end)] == list(range(len(row.input_ids)))
    for chain in chains:
        if chain.start < row.num_tokens:
            seen = [at for start, end in chain.prefix for at in range(start, end)]
            assert seen == paths(row)[chain.start][:-1].tolist()


@pytest.mark.parametrize("budget", [300, 384, 1000])
@pytest.mark.parametrize("layout", ["tree", "expanded"])
def test_block_mask_is_bit_equal_to_the_dense_rule(budget, layout):
    """S may be no multiple of the block, and a row may be padded far beyond its trees."""
    for row in pack(forest(1), budget, multiple_of=384 if budget == 384 else 1, layout=layout)[0]:
        until = torch.from_numpy(row.visible_until)
        partial, full = block_visibility(until)
        assert not (partial & full).any()
        length = len(until)
        at = np.arange(partial.shape[0] * BLOCK)
        rule = np.zeros((len(at), len(at)), dtype=bool)
        rule[:length, :length] = visible(row)
        blocks = rule.reshape(len(partial), BLOCK, len(partial), BLOCK).swapaxes(1, 2)
        some, every = blocks.any((2, 3)), blocks.all((2, 3))
        assert (full.numpy() == (every & ~np.eye(len(every), dtype=bool))).all()
        assert ((partial | full).numpy() == some).all()
        mask = tree_block_mask(until)
        assert (mask.to_dense()[0, 0].bool().numpy() == some).all()
        at = torch.arange(length)
        assert (mask.mask_mod(0, 0, at[:, None], at[None]).numpy() == visible(row)).all()


def naive_delta_rule(q, k, v, g, beta, row: Row) -> torch.Tensor:
    """Compute the recurrence as written, each position from the state of the one before it on its path."""
    q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], dim=2) for x in (q, k))
    states, outputs = {}, []
    for path in paths(row):
        t = int(path[-1])
        state = (
            states[int(path[-2])]
            if len(path) > 1
            else torch.zeros_like(k[:, 0, :, :, None] * v[:, 0, :, None])
        )
        state = state * g[:, t].exp()[..., None, None]
        read = (k[:, t, :, :, None] * state).sum(-2)
        state = state + k[:, t, :, :, None] * ((v[:, t] - read) * beta[:, t, :, None])[:, :, None]
        states[t] = state
        outputs.append((q[:, t, :, :, None] * state).sum(-2) * q.shape[-1] ** -0.5)
    outputs += [0 * v[:, 0]] * (len(row.input_ids) - row.num_tokens)
    return torch.stack(outputs, 1)


def delta_inputs(length: int, heads: int = 4, key: int = 8, value: int = 6) -> list[torch.Tensor]:
    """Return inputs with two value heads for each key head."""
    q, k = (normal(i, 1, length, heads // 2, key) for i in (0, 1))
    v, g, beta = normal(2, 1, length, heads, value), normal(3, 1, length, heads), normal(4, 1, length, heads)
    return [q, k, v, g, beta]


def activated(q, k, v, g, beta):
    q, k = (torch.nn.functional.normalize(x, dim=-1) for x in (q, k))
    return q, k, v, -torch.nn.functional.softplus(g), beta.sigmoid()


def sequential_kernel(
    q, k, v, g, beta, initial_state, output_final_state, cu_seqlens, chunk_indices, chunk_size
):
    """Stand in for fla's kernel, by its signature and shapes, one position after the other."""
    assert torch.equal(chunk_indices, chunks_of(cu_seqlens, chunk_size))
    q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], dim=2) for x in (q, k))
    outputs, states = [], []
    for sequence, (start, end) in enumerate(pairwise(cu_seqlens)):
        state = q.new_zeros(*q.shape[2:], v.shape[-1]) if initial_state is None else initial_state[sequence]
        for t in range(start, end):
            state = state * g[0, t].exp()[:, None, None]
            new = (v[0, t] - (k[0, t, :, :, None] * state).sum(-2)) * beta[0, t, :, None]
            state = state + k[0, t, :, :, None] * new[:, None]
            outputs.append((q[0, t, :, :, None] * state).sum(-2) * q.shape[-1] ** -0.5)
        states.append(state)
    return torch.stack(outputs)[None], torch.stack(states) if output_final_state else None


def chunks_of(cu_seqlens: torch.Tensor, size: int) -> torch.Tensor:
    """Return each chunk's sequence and its number there. fla computes this itself, waiting for the GPU, if it
    is not given."""
    counts = [-(-length // size) for length in cu_seqlens.diff().tolist()]
    return torch.tensor([(number, i) for number, count in enumerate(counts) for i in range(count)])


DELTA_RULES = {
    "chunks of the row's own size": chunked_delta_rule,
    "chunks of 4": lambda *inputs: chunked_delta_rule(*inputs, 4),
    "chunks of 64": lambda *inputs: chunked_delta_rule(*inputs, 64),
    "run by run": lambda *inputs: run_by_run_delta_rule(*inputs, sequential_kernel),
}
"""The last one is the GPU's path, with a stand-in of the kernel's signature."""


def test_delta_rules_equal_the_recurrence(row):
    inputs = delta_inputs(len(row.input_ids))
    reference = naive_delta_rule(*activated(*inputs), row).swapaxes(1, 2)
    for rule in DELTA_RULES.values():
        ours = rule(*activated(*inputs), TreeParams.from_row(row, "cpu")).swapaxes(1, 2)
        assert_equal_with_gradients(ours, reference, inputs, row.num_tokens, 1e-11)


def test_convolution_follows_the_path(row):
    width, channels = 4, 5
    x, weight = normal(0, 1, len(row.input_ids), channels), normal(1, channels, 1, width)
    ours = tree_convolution(x, weight, TreeParams.from_row(row, "cpu"))
    reference = 0 * x * weight[:, 0, 0]
    for path in paths(row):
        window = path[-width:]
        taps = weight[:, 0, width - len(window) :].T
        reference[0, path[-1]] = (x[0, window.tolist()] * taps).sum(0)
    assert_equal_with_gradients(ours[:, None], reference[:, None], [x, weight], row.num_tokens, 1e-12)


def test_runs_join_only_children():
    """Nothing forks off inside an expanded sequence: it is one run with one state."""
    for row in rows(layout="expanded"):
        tree = TreeParams.from_row(row, "cpu")
        assert all(run.parent == -1 for run in tree.runs)
        assert len(tree.runs) <= len(row.nodes) + 1


@given(st.lists(st.integers(1, 200), min_size=1, max_size=30))
def test_chunks_of_short_runs_are_short(lengths):
    starts = np.cumsum([0, *lengths]).tolist()
    nodes = [RowNode(start, length, -1, 0, 0) for start, length in zip(starts, lengths, strict=False)]
    tree = replace(TreeParams.causal(sum(lengths), "cpu"), nodes=tuple(nodes))
    size = tree.chunk_size(32)
    filled = {size: len(tree.chunks(size).positions) for size in (1, 2, 4, 8, 16, 32)}
    assert filled[size] <= 1.5 * sum(lengths)
    assert all(filled[larger] > 1.5 * sum(lengths) for larger in filled if larger > size)


@pytest.mark.parametrize("size", [4, 32])
def test_later_layers_find_what_the_first_worked_out_on_the_host(row, size, monkeypatch):
    tree = TreeParams.from_row(row, "cpu")
    inputs = [x.detach() for x in delta_inputs(len(row.input_ids))]
    x, weight = normal(0, 1, len(row.input_ids), 3).detach(), normal(1, 3, 1, 4).detach()

    def layer() -> list[torch.Tensor]:
        return [
            tree_convolution(x, weight, tree),
            chunked_delta_rule(*activated(*inputs), tree, size),
            run_by_run_delta_rule(*activated(*inputs), tree, sequential_kernel),
        ]

    first = layer()
    monkeypatch.setattr(torch, "from_numpy", lambda array: pytest.fail("worked out again"))
    assert all(torch.equal(a, b) for a, b in zip(layer(), first, strict=True))


class Compiler:
    """Back end of ``torch.compile``: kernels run as plain PyTorch, on a CPU. ``made``: for each of them, the
    rows that it serves. One for ``whole blocks`` need not check where a row ends."""

    def __init__(self) -> None:
        self.made: list[str] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: list) -> Any:
        values = (node.meta.get("example_value") for node in graph.graph.nodes if node.op == "placeholder")
        queries = next(x for x in values if isinstance(x, torch.Tensor) and x.dim() == 4)  # [1, heads, n, 8]
        sizes, length = SizeVarAllocator(queries.shape[2].node.shape_env), queries.shape[2].node.expr
        whole = sizes.statically_known_true(sympy.Eq(Mod(length, BLOCK), 0))
        self.made.append("whole blocks" if whole else "any length")
        return graph


@pytest.fixture
def compiler() -> Compiler:
    return Compiler()


@pytest.fixture
def attend(compiler, monkeypatch) -> Callable[..., None]:
    """Return a function that compares attention of a row by ``kernel`` with dense attention."""

    compiled = cache(partial(torch.compile, dynamic=True, backend=compiler))

    def attend(kernel: Callable, row: Row) -> None:
        monkeypatch.setattr(tree_attention, "_compiled_flex_attention", lambda whole_blocks: compiled(kernel))
        length, used = len(row.input_ids), row.num_tokens
        q, k, v = (normal(i, 1, heads, length, 8).detach() for i, heads in enumerate((4, 2, 2)))
        ours = flex_tree_attention(q, k, v, TreeParams.from_row(row, "cpu"), 8**-0.5)
        expected = dense_attention(q, k, v, visible(row))
        torch.testing.assert_close(ours[:, :, :used], expected[:, :, :used], rtol=1e-12, atol=1e-12)

    return attend


def test_one_kernel_serves_rows_of_any_length(compiler, attend):
    for row in rows(260) + rows(384, 384) + rows(336, layout="expanded") + rows(1000):
        attend(flex_attention, row)
    assert compiler.made == ["any length"]


def test_one_kernel_that_checks_no_ends_serves_all_rows_of_whole_blocks(compiler, attend):
    for row in WHOLE_BLOCKS:
        attend(whole_block_attention, row)
    assert compiler.made == ["whole blocks"]


@pytest.mark.parametrize(("gpu", "ranks", "multiple"), [(True, 8, 128), (True, 3, 384), (False, 8, 8)])
def test_rows_are_whole_blocks_on_gpus_alone(gpu, ranks, multiple, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    config: Any = SimpleNamespace(tensor_model_parallel_size=ranks, sequence_parallel=True)
    assert row_multiple(config) == multiple
