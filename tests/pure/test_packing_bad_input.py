"""A tree that cannot be trained on is named, with its fault."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest

from megatron_eqlen.packing.checks import check_route_shapes, check_routes
from megatron_eqlen.packing.tree import Forest
from megatron_eqlen.tokens import Placeholder, Ragged, Tokens
from megatron_eqlen.types import Node, TokenTree
from tests.kit.tree_samples import pack


def side(parent: int, advantage: float = 1.0, weight: float = 0.5, **columns) -> Node:
    columns = {"token_ids": [3, 4], "logprobs": [-1.0, -1.0]} | columns
    return Node(parent, Tokens.of(**columns), advantage, weight)


@pytest.mark.parametrize(("nodes", "message"), [
    ([side(0)], "node 0: expected a parent before it (-1: the root), found 0"),
    ([Node(-1, Tokens.of([1])), side(-1)], "node 1: expected a parent before it"),
    ([Node(-1, Tokens.of([1])), side(2), side(0)], "node 1: expected a parent before it"),
    ([Node(-1, Tokens.of([1])), side(1)], "node 1: expected a parent before it"),
    ([Node(-1, Tokens.of([1])), side(0, logprobs=None)], "node 1: supervised (weight > 0) without"),
    ([Node(-1, Tokens.of([1])), side(0, logprobs=[-1.0, math.nan])], "rollout_logprob of token 1 is nan"),
    ([Node(-1, Tokens.of([1] * 30)), side(0)],
     "node 1: the path that ends there takes 31 positions; a row has 16"),
])  # fmt: skip
def test_bad_trees_are_named(nodes, message):
    good = TokenTree("good#0", [Node(-1, Tokens.of([1, 2])), side(0)])
    with pytest.raises(ValueError, match="bad#1") as error:
        pack([good, TokenTree("bad#1", nodes)], 16)
    assert message in str(error.value)


def test_a_path_that_is_pruned_may_be_long():
    tree = TokenTree("tail", [Node(-1, Tokens.of([1, 2])), side(0), Node(0, Tokens.of([5] * 100))])
    assert pack([tree], 16)[0][0].num_tokens == 3


@pytest.mark.parametrize(("mask", "message"), [
    (None, "node 2: supervised (weight > 0) without the column kept, which other nodes"),
    ([(3,), ()], "node 2: expected the token 4 in its sampling mask, found []"),
    ([(4,), (3, 4)], "node 2: expected the token 3 in its sampling mask, found [4]"),
])  # fmt: skip
def test_bad_sampling_masks_are_named(mask, message):
    good = side(0, kept=[(1, 3), (4, 9)])
    with pytest.raises(ValueError, match=re.escape(message)):
        pack([TokenTree("t", [Node(-1, Tokens.of([1, 2])), good, side(0, kept=mask)])], 16)


@pytest.mark.parametrize(("counts", "last"), [((2, 1), -3.0), ((1, 2), math.nan)], ids=["counts", "nan"])
def test_log_probs_that_do_not_fit_their_sampling_masks_are_named(counts, last):
    logprobs = Ragged(np.array([-1, -2, last], np.float32), np.array(counts, np.uint8))
    nodes = [Node(-1, Tokens.of([1, 2])), side(0, kept=[(3,), (4, 9)], kept_logprobs=logprobs)]
    with pytest.raises(ValueError, match="node 1: expected a finite log-prob of each token in a sampling"):
        pack([TokenTree("t", nodes)], 16)


ROUTES = np.array([[[0, 1]], [[7, 3]]], np.uint8)
"""Routes of two tokens, through one layer, to two of eight experts."""


@pytest.mark.parametrize("column", [{"logprobs": [-1.0]}, {"kept": [(3,)]}, {"routes": ROUTES[:1]}], ids=str)
def test_a_column_of_too_few_tokens_is_named(column):
    (name,) = column
    with pytest.raises(ValueError, match=f"column {name}: expected values of 2 tokens, found 1"):
        side(0, **column)


@pytest.mark.parametrize(("experts", "twice", "message"), [
    (7, False, "node 1: expected experts 0 to 6, found 7"),
    (8, True, r"node 1: expected different experts for a token, found [0, 0] in row 1 of its routes"),
])  # fmt: skip
def test_bad_routes_are_named(experts, twice, message):
    routes = ROUTES.copy()
    routes[1:] *= not twice
    forest = Forest.of(
        [TokenTree("t", [Node(-1, Tokens.of([1, 2], routes=ROUTES[[0, 0]])), side(0, routes=routes)])]
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        check_routes(forest, np.arange(2), experts)


def test_an_expert_that_a_later_layer_has_twice_is_named():
    routes = np.array([[[0, 1], [2, 2]]] * 2, np.uint8)
    forest = Forest.of([TokenTree("t", [Node(-1, Tokens.of([1])), side(0, routes=routes)])])
    with pytest.raises(ValueError, match=r"different experts for a token, found \[2, 2\] in row 0"):
        check_routes(forest, np.arange(2), 8)


def test_routes_of_another_shape_are_named_though_the_arrays_are_elsewhere():
    tree = TokenTree(
        "t", [Node(-1, Tokens.of([1])), side(0, routes=Placeholder(ROUTES.shape, ROUTES.dtype.name))]
    )
    with pytest.raises(ValueError, match="node 1: expected routes of the model's 4 MoE layers x 2 experts"):
        check_route_shapes(Forest.of([tree]), (4, 2))
    check_route_shapes(Forest.of([tree]), (1, 2))
