"""Token trees and rows for tests: streams, groups, and trees of any shape."""

from __future__ import annotations

from typing import Any

import numpy as np

from megatron_eqlen.packing.pack import plan_rows
from megatron_eqlen.tokens import Ragged, Tokens
from megatron_eqlen.types import Node, Row, TokenTree

VOCABULARY = 96


def pack(trees: list[TokenTree], budget: int, data_parallel: int = 1, **options: Any) -> list[list[Row]]:
    """Return all rows of every data-parallel rank."""
    planned = plan_rows(trees, budget, data_parallel, **options)
    return [[*planned.rows(rank)] for rank in range(data_parallel)]


def tokens(rng: np.random.Generator, count: int) -> list[int]:
    return rng.integers(0, VOCABULARY, count).tolist()


def node(rng: np.random.Generator, parent: int, length: int, weight: float | None = None) -> Node:
    """Return a node with random tokens, advantage, log-probs, and weight if none is given."""
    token_ids, advantage = tokens(rng, length), float(rng.normal())
    weight = float(rng.uniform(0.1, 1.0)) if weight is None else weight
    return Node(parent, Tokens.of(token_ids, -rng.exponential(1.0, length)), advantage, weight)


def stream(rng: np.random.Generator, prompt: int, lengths: list[int]) -> TokenTree:
    """Return the caterpillar of an EqLen stream: pair i forks two sides of ``lengths[i]`` off the trunk."""
    nodes, trunk = [Node(-1, Tokens.of(tokens(rng, prompt)))], 0
    for length in lengths:
        nodes += [node(rng, trunk, length), node(rng, trunk, length)]
        trunk = len(nodes) - 1
    return TokenTree(f"stream {prompt} {lengths}", nodes)


def group(rng: np.random.Generator, prompt: int, lengths: list[int]) -> TokenTree:
    """Return the star of a GRPO group: one completion for each of ``lengths``."""
    return TokenTree(
        f"group {prompt}", [Node(-1, Tokens.of(tokens(rng, prompt))), *(node(rng, 0, n) for n in lengths)]
    )


def any_tree(rng: np.random.Generator, count: int, longest: int) -> TokenTree:
    """Return a tree of random shape; some nodes, also at the ends, are not supervised."""
    nodes = [Node(-1, Tokens.of(tokens(rng, int(rng.integers(1, longest)))))]
    for i in range(1, count):
        weight = None if rng.random() < 0.7 else 0.0
        nodes.append(node(rng, int(rng.integers(0, i)), int(rng.integers(1, longest)), weight))
    return TokenTree(f"any {count}", nodes)


def answered(tree: TokenTree) -> TokenTree:
    """Return the tree, where an environment gave the middle of each node, or its last token."""
    for number, node in enumerate(tree.nodes[1:]):
        middle, last = len(node) // 2, len(node) - 1
        given = set(range(middle, middle + 3)) if number % 2 else {last}
        column = Ragged.of([0] if at in given and at > 0 else [] for at in range(len(node)))
        node.tokens = node.tokens.with_column("given", column)
    return tree


def forest(seed: int) -> list[TokenTree]:
    """Return streams, a group and general trees, with prompts of one and two tokens among them. An
    environment gave tokens of the first."""
    rng = np.random.default_rng(seed)
    return [
        answered(stream(rng, 7, [5, 70, 3, 1])), stream(rng, 1, [2, 4, 1]), stream(rng, 2, [9]),
        group(rng, 5, [8, 66, 2]), group(rng, 1, [3, 4]), any_tree(rng, 9, 12), any_tree(rng, 5, 80),
    ]  # fmt: skip


def masked(trees: list[TokenTree], seed: int = 0) -> list[TokenTree]:
    """Return the same trees, where each token was drawn from itself and up to five others."""
    rng = np.random.default_rng(seed)
    for sampled in (node for tree in trees for node in tree.nodes[1:]):
        lists = [sorted({int(token), *tokens(rng, int(rng.integers(0, 6)))}) for token in sampled.token_ids]
        generated = sampled.tokens.is_generated
        kept = Ragged.of(ids if mine else [] for ids, mine in zip(lists, generated, strict=True))
        sampled.tokens = sampled.tokens.with_column("kept", kept)
    return trees


def visible(row: Row) -> np.ndarray:
    """Return [S, S] bool, [query, key]: the rule as ``types.Row`` states it."""
    at = np.arange(len(row.input_ids))
    return (at[None] <= at[:, None]) & (at[:, None] < row.visible_until[None])


def paths(row: Row) -> list[np.ndarray]:
    """Return for each position in use the positions of its path, itself last."""
    seen = visible(row)
    return [np.flatnonzero(seen[q]) for q in range(row.num_tokens)]
