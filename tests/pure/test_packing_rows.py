"""Properties of a packed row, stated from the trees' paths alone (never from the packer's own numbers)."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_eqlen.packing.pack import pairs_seen, plan_rows
from megatron_eqlen.packing.tree import Forest
from megatron_eqlen.tokens import Tokens
from megatron_eqlen.types import Node, Row, TokenTree
from tests.kit.marks import examples
from tests.kit.tree_samples import pack


@st.composite
def token_trees(draw: st.DrawFn, max_nodes: int = 12) -> TokenTree:
    """Draw a tree of any shape; about a third of the nodes unsupervised; tokens tell nodes apart."""
    count = draw(st.integers(1, max_nodes))
    nodes = [Node(-1, Tokens.of(draw(st.lists(st.integers(0, 50), min_size=1, max_size=6))))]
    for i in range(1, count):
        tokens = draw(st.lists(st.integers(0, 50), min_size=1, max_size=7))
        weight = draw(st.sampled_from([0.0, 0.25, 1.5]))
        advantage = draw(st.sampled_from([-1.0, 0.0, 0.5]))
        logprobs = [-0.01 * (i + j) for j in range(len(tokens))]
        nodes.append(Node(draw(st.integers(0, i - 1)), Tokens.of(tokens, logprobs), advantage, weight))
    return TokenTree(f"tree{draw(st.integers(0, 10**6))}", nodes)


forests = st.lists(token_trees(), min_size=1, max_size=6)


def path_tokens(tree: TokenTree, node: int) -> list[int]:
    """Return every token from the prompt's first to the node's last."""
    above = tree.nodes[node].parent
    return (path_tokens(tree, above) if above >= 0 else []) + tree.nodes[node].token_ids.tolist()


def longest_path(trees: list[TokenTree]) -> int:
    return max(len(path_tokens(tree, i)) - 1 for tree in trees for i in range(len(tree.nodes)))


def what_is_trained(trees: list[TokenTree]) -> list[tuple]:
    """Return (path before, label, advantage, weight, log-prob) of every supervised token, sorted."""
    facts = []
    for tree in trees:
        for node in tree.nodes:
            before = path_tokens(tree, node.parent) if node.parent >= 0 else []
            for j, token in enumerate(node.token_ids.tolist() if node.weight else []):
                prefix = tuple(before + node.token_ids[:j].tolist())
                facts.append((prefix, token, node.advantage, node.weight, node.tokens["logprobs"][j]))
    return sorted(facts)


def what_rows_train(rows: list[Row]) -> list[tuple]:
    """Return the same, read back from rows through the visibility rule."""
    facts = []
    for row in rows:
        for q in np.flatnonzero(row.segment_ids >= 0):
            k = np.arange(len(row.input_ids))
            seen = np.flatnonzero((k <= q) & (q < row.visible_until))
            assert row.position_ids[seen].tolist() == list(range(len(seen)))
            prefix = tuple(row.input_ids[seen].tolist())
            facts.append(
                (prefix, row.labels[q], row.advantages[q], row.weights[q], row.column("logprobs")[q])
            )
    return sorted(facts)


@examples(80)
@given(
    forests, st.integers(0, 40), st.integers(1, 3), st.integers(1, 4), st.sampled_from(["tree", "expanded"])
)
def test_every_supervised_token_once_with_its_path(trees, slack, ranks, multiple_of, layout):
    budget = max(longest_path(trees), 1) + slack
    per_rank = pack(trees, budget, ranks, multiple_of=multiple_of, layout=layout)
    rows = [row for rank in per_rank for row in rank]
    assert what_rows_train(rows) == what_is_trained(trees)
    assert len(per_rank) == ranks
    assert len({len(rank) for rank in per_rank}) == 1
    for row in rows:
        length = len(row.input_ids)
        assert length == -(-max(row.num_tokens, 1) // multiple_of) * multiple_of
        assert row.num_tokens <= budget
        assert (row.visible_until[row.num_tokens :] == np.arange(row.num_tokens, length) + 1).all()
        assert ((row.weights > 0) == (row.segment_ids >= 0)).all()


@examples(40)
@given(forests, st.integers(0, 60))
def test_row_nodes_agree_with_the_arrays(trees, slack):
    """Back ends that walk nodes and back ends that read ``visible_until`` must see the same rule."""
    for row in pack(trees, max(longest_path(trees), 1) + slack)[0]:
        covered = []
        for i, node in enumerate(row.nodes):
            span = np.arange(node.start, node.start + node.length)
            covered += span.tolist()
            assert (row.position_ids[span] == node.position + np.arange(node.length)).all()
            above, ancestors = node.parent, 0
            while above >= 0:
                assert above < i
                ancestors += row.nodes[above].length
                above = row.nodes[above].parent
            assert ancestors == node.position
        assert covered == list(range(row.num_tokens))


@examples(25)
@given(forests, st.integers(1, 3), st.sampled_from(["tree", "expanded"]))
def test_packing_is_deterministic_and_segments_do_not_depend_on_it(trees, ranks, layout):
    budget = longest_path(trees) + 10
    first, second = (
        [row for rank in pack(trees, budget, ranks, layout=layout) for row in rank] for _ in range(2)
    )
    for a, b in zip(first, second, strict=True):
        assert dataclasses.asdict(a).keys() == dataclasses.asdict(b).keys()
        for field in ("input_ids", "labels", "visible_until", "segment_ids", "weights"):
            assert (getattr(a, field) == getattr(b, field)).all()
    lengths = [len(node.token_ids) for tree in trees for node in tree.nodes if node.weight]
    ids = np.concatenate([row.segment_ids for row in first])
    assert np.bincount(ids[ids >= 0], minlength=len(lengths)).tolist() == lengths


def caterpillar(lengths: list[int], dead: frozenset[int] = frozenset(), name: str = "stream") -> TokenTree:
    """Return a stream with pairs of ``lengths``; pairs in ``dead`` carry no weight."""
    nodes, trunk = [Node(-1, Tokens.of([1] * 5))], 0
    for pair, length in enumerate(lengths):
        weight = 0.0 if pair in dead else 1.0
        for side in (1.0, -1.0):
            nodes.append(Node(trunk, Tokens.of([10 + pair] * length, [0.0] * length), side, weight))
        trunk = len(nodes) - 1
    return TokenTree(name, nodes)


def test_pruning_drops_skipped_leaves_dead_trunk_tails_and_dead_streams():
    trees = [caterpillar([3, 4, 5], dead=frozenset({0, 2})), caterpillar([6], dead=frozenset({0}))]
    ((row,),) = pack(trees, 100)
    assert row.num_tokens == 4 + 3 + 2 * 4  # prompt, B_1 as context, A_2 and B_2
    assert plan_rows(trees, 100).metrics["packing/pruned_tokens"] == 3 + 2 * 5 + 4 + 2 * 6


def test_trunk_is_one_contiguous_causal_piece():
    ((row,),) = pack([caterpillar([3, 4, 5])], 100)
    trunk = 4 + 3 + 4 + 5
    assert row.position_ids[:trunk].tolist() == list(range(trunk))
    assert [node.length for node in row.nodes] == [4, 3, 4, 5, 5, 4, 3]


def test_a_tree_larger_than_a_row_repeats_only_context():
    tree = caterpillar([10] * 4)
    planned = plan_rows([tree], 44)
    rows = planned.rows(0)
    assert len(rows) > 1
    assert what_rows_train(rows) == what_is_trained([tree])
    expanded = plan_rows([tree], 44, layout="expanded").metrics["packing/tokens"]
    assert planned.metrics["packing/tokens"] < planned.metrics["packing/expanded_tokens"] == expanded
    assert planned.metrics["packing/repeated_tokens"] == planned.metrics["packing/tokens"] - (4 + 8 * 10) > 0


def test_cost_counts_the_pairs_that_attention_sees():
    tree = caterpillar([3, 4])
    ((row,),) = pack([tree], 100)
    k = np.arange(len(row.input_ids))
    pairs = ((k[None] <= k[:, None]) & (k[:, None] < row.visible_until[None])).sum()
    assert pairs_seen(Forest.of([tree])).sum() == pairs


def depth_first(tree: TokenTree) -> list[int]:
    """Return the nodes that have a supervised node at or below them, longest child first."""

    def walk(number: int) -> tuple[int, list[int]]:
        below = [walk(child) for child, node in enumerate(tree.nodes) if node.parent == number]
        below = sorted((found for found in below if found[1]), key=lambda found: -found[0])
        kept = [number] if below or tree.nodes[number].weight > 0 else []
        height = len(tree.nodes[number]) + max((height for height, _ in below), default=0)
        return height, kept + [node for _, nodes in below for node in nodes]

    return walk(0)[1]


@examples(200)
@given(forests)
def test_nodes_that_are_trained_or_above_those_lie_depth_first_with_the_longest_child_first(trees):
    firsts = np.cumsum([0, *(len(tree.nodes) for tree in trees)]).tolist()
    expected = [
        first + node for first, tree in zip(firsts, trees, strict=False) for node in depth_first(tree)
    ]
    assert Forest.of(trees).row_order().tolist() == expected


def test_ranks_get_equal_cost_and_rows():
    rng = np.random.default_rng(0)
    trees = [caterpillar(rng.integers(5, 60, rng.integers(1, 9)).tolist()) for _ in range(200)]
    planned = plan_rows(trees, 2000, data_parallel=8, pair_cost=1e-3)
    assert planned.metrics["packing/max_over_mean_cost"] < 1.005
    assert planned.metrics["packing/fill"] == 1.0
    costs = planned.forest.length + 1e-3 * pairs_seen(planned.forest)
    of_rows = np.array([[costs[planned.parts.of(row)[0]].sum() for row in rows] for rows in planned.ranks])
    assert (np.diff(of_rows) <= 0).all(), "rows that ranks compute together are alike"
    of_ranks = of_rows.sum(1)
    assert planned.metrics["packing/max_over_mean_cost"] == pytest.approx(of_ranks.max() / of_ranks.mean())
    assert sum(len(row) for rows in planned.ranks for row in rows) == len(trees), "a tree that fits is whole"


def test_ranks_begin_with_their_costliest_row_though_another_is_fuller():
    leaves = [[5] * 20, [80]]  # a star costs less than a chain of fewer tokens
    trees = [
        TokenTree(f"{number}", [Node(-1, Tokens.of([1, 1])), *(one_leaf(length) for length in lengths)])
        for number, lengths in enumerate(leaves * 2)
    ]
    planned = plan_rows(trees, 101, data_parallel=2, pair_cost=1.0)
    assert [[planned.sizes[row].sum() for row in rows] for rows in planned.ranks] == [[81, 101], [81, 101]]


def one_leaf(length: int) -> Node:
    return Node(0, Tokens.of([1] * length, [0.0] * length), 1.0, 1.0)


def test_nothing_to_train_gives_padding_rows():
    ranks = pack([caterpillar([3], dead=frozenset({0}))], 16, data_parallel=2, multiple_of=8)
    for rank in ranks:
        (row,) = rank
        assert row.num_tokens == 0
        assert len(row.input_ids) == 8
        assert not row.weights.any()


def test_a_budget_of_exactly_the_longest_path_is_enough():
    tree = caterpillar([7, 9, 2])
    budget = longest_path([tree])
    rows = pack([tree], budget)[0]
    assert what_rows_train(rows) == what_is_trained([tree])
    assert max(row.num_tokens for row in rows) == budget
    with pytest.raises(ValueError, match=f"takes {budget} positions; a row has {budget - 1}"):
        pack([tree], budget - 1)
