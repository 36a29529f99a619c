"""Properties of a packed row, stated from the trees' paths alone (never from the packer's own numbers)."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_eqlen.packing.checks import check_routes
from megatron_eqlen.packing.pack import pairs_seen, plan_rows
from megatron_eqlen.packing.tree import Forest
from megatron_eqlen.tokens import Ragged, Tokens
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


def conversation(rng: np.random.Generator, number: int) -> TokenTree:
    """Return a tree of any shape in which an environment gave some tokens, with routes and masks. No token
    occurs twice; routes, log-probs and masks follow from it."""
    ids = np.arange(1000 * number, 1000 * number + rng.integers(1, 7))
    routes = routes_of(ids).astype(np.uint8)
    routes[0] = 0  # of a prompt's first token there are none
    nodes = [Node(-1, Tokens.of(ids, routes=routes))]
    for place in range(1, rng.integers(2, 9)):
        ids = np.arange(ids[-1] + 1, ids[-1] + 1 + rng.integers(1, 7))
        own = (rng.random(len(ids)) < 0.7).tolist()
        kept = Ragged.of([mask_of(token) * mine for token, mine in zip(ids.tolist(), own, strict=True)])
        columns = {
            "given": Ragged.of([() if mine else (0,) for mine in own]),
            "routes": (routes_of(ids) * np.array(own)[:, None, None]).astype(np.uint8),
            "kept": kept,
            "kept_logprobs": Ragged(-0.5 * kept.values, kept.counts),
            "versions": ids % 3,
        }
        parent, weight = int(rng.integers(0, place)), float(rng.integers(0, 3))
        nodes.append(Node(parent, Tokens.of(ids, -0.01 * ids, **columns), float(place), weight))
    return TokenTree(f"{number}", nodes)


def routes_of(tokens: np.ndarray) -> np.ndarray:
    """Return [n, 2 layers, 2 experts], other ones for the next token."""
    return np.stack([tokens % 7, 7 + tokens % 11, tokens % 5, 5 + tokens % 3], axis=1).reshape(-1, 2, 2)


def mask_of(token: int) -> tuple[int, ...]:
    return tuple(range(token - token % 4, token + 1))


@pytest.mark.parametrize("seed", range(8))
def test_a_row_has_the_columns_of_tokens_that_the_policy_generated_and_no_others(seed):
    rng = np.random.default_rng(seed)
    trees = [conversation(rng, number) for number in range(1, 5)]
    nodes = {token: node for tree in trees for node in tree.nodes for token in node.token_ids}
    own = [token for token, node in nodes.items() if token in node.token_ids[node.tokens.is_generated]]
    budget = max(longest_path(trees), 1) + 3
    planned, trained = plan_rows(trees, budget, data_parallel=2, multiple_of=8), list[int]()
    for rows in map(planned.rows, range(2)):
        counts = [int((row.weights > 0).sum()) for row in rows]
        rows.others = {"old": [np.arange(1.0, count + 1) for count in counts], "ref": []}
        for row, count in zip(rows, counts, strict=True):
            used = row.labels[: row.num_tokens]
            expected = np.where(np.isin(used, own)[:, None, None], routes_of(used), -1)
            assert not len(used) or np.array_equal(row.path_columns["routes"][: row.num_tokens], expected)
            assert row.path_columns.keys() == ({"routes"} if len(used) else set())
            assert all((values[row.num_tokens :] == -1).all() for values in row.path_columns.values())
            labels = row.labels[row.weights > 0].tolist()
            trained += labels
            versions = np.where(row.weights > 0, row.labels % 3, -1)
            assert np.array_equal(row.column("versions"), versions)
            assert row.advantages[row.weights > 0].tolist() == [nodes[label].advantage for label in labels]
            assert not count or [*map(tuple, row.columns["kept"])] == [*map(mask_of, labels)]
            assert np.allclose(row.column("logprobs")[row.weights > 0], -0.01 * np.array(labels))
            assert row.others.keys() == {"old"}
            assert row.others["old"][row.weights > 0].tolist() == [*range(1, count + 1)]
            assert not row.others["old"][row.weights == 0].any()
    assert sorted(trained) == sorted(token for token in own if nodes[token].weight > 0)
    forest, needed = planned.forest, [planned.needed(rank)[1] for rank in range(2)]
    assert sorted(np.concatenate(needed)) == np.flatnonzero(forest.weight > 0).tolist(), "each on one rank"
    check_routes(forest, np.arange(len(forest)), 18)


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


@pytest.mark.parametrize("multiple", [1, 4])
def test_metrics_are_those_of_the_rows(multiple):
    """Two ranks, one of which needs a row more; a row is padded to 8 positions."""
    trees = [caterpillar([10] * 4), caterpillar([6, 3], dead=frozenset({1})), caterpillar([9])]
    planned = plan_rows(trees, 44, 2, 8, row_count_multiple_of=multiple)
    rows = [row for rank in range(2) for row in planned.rows(rank)]
    assert len(rows) / 2 % multiple == 0
    used, computed = sum(row.num_tokens for row in rows), sum(len(row.labels) for row in rows)
    unique = (4 + 8 * 10) + (4 + 2 * 6) + (4 + 2 * 9)
    # each position is visible from itself to its node's end
    pairs = sum((row.visible_until - np.arange(len(row.labels)))[: row.num_tokens].sum() for row in rows)
    expected = {
        "rows": len(rows), "tokens": used, "computed_tokens": computed, "unique_tokens": unique,
        "repeated_tokens": used - unique, "pruned_tokens": 2 * 3, "fill": used / computed,
        "context": pairs / used,
        "budget_fill": used / (44 * len(rows)), "supervised_tokens": unique - 3 * 4,
        "expanded_tokens": sum(4 + 10 * (pair + 1) for pair in range(4) for _ in "ab") + 2 * 10 + 2 * 13,
    }  # fmt: skip
    assert {name: planned.metrics[f"packing/{name}"] for name in expected} == expected
    assert used > unique < computed


def test_the_longest_parts_are_placed_first():
    """In the order of their lengths 4, 4, 6 and 6 would fill three rows."""
    trees = [caterpillar([length], name=f"{place}") for place, length in enumerate([4, 6, 4, 6])]
    sizes = plan_rows(trees, 100).sizes.tolist()
    assert plan_rows(trees, min(sizes) + max(sizes)).metrics["packing/rows"] == 2


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
