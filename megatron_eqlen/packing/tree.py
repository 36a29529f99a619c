"""Flat forest of token trees: checked, pruned, and put in row order.

``Forest.of(trees)`` reads every node once into arrays (a batch has tens of thousands of nodes and millions of
tokens). It reads only the number of tokens, so skeletons suffice. It relies on three exact facts:

* A node without a supervised node at or below it changes no loss and no gradient: it is pruned.
* Restricting depth-first order to a set of nodes that holds all its ancestors is depth-first order again.
* With the longest child first, a trunk is one contiguous piece of its row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from megatron_eqlen.tokens import COLUMNS
from megatron_eqlen.types import Node, TokenTree


class TreeError(ValueError):
    """Token tree that cannot be trained on; the message names the tree and the node."""


class NonFiniteTreeError(TreeError):
    """Token tree with a number that is not finite."""


@dataclass(frozen=True)
class Forest:
    """All nodes of a batch. Arrays are [n] over nodes, in the order of the trees and their nodes."""

    names: list[str]
    nodes: list[Node]
    tree: np.ndarray
    """int64, index of the node's tree."""
    parent: np.ndarray
    """int64, index in this forest, -1 for roots; always before the node."""
    length: np.ndarray
    """int64, positions in a row: number of tokens, one less for a root."""
    weight: np.ndarray
    """float64"""
    home: np.ndarray
    """int64, the rank that holds the node's arrays, -1 if every rank does."""

    @classmethod
    def of(cls, trees: Sequence[TokenTree]) -> Forest:
        """Return the checked forest of ``trees``. Raises TreeError on the first invalid tree."""
        nodes = [node for tree in trees for node in tree.nodes]
        counts = np.array([len(tree.nodes) for tree in trees], dtype=np.int64)
        names = [tree.name for tree in trees]
        _check_roots(trees)
        index = np.repeat(np.arange(len(trees)), counts)
        first = np.repeat(np.cumsum(counts) - counts, counts)
        local = np.arange(len(nodes)) - first
        parent = np.fromiter((node.parent for node in nodes), np.int64, len(nodes))
        length = np.fromiter(map(len, nodes), np.int64, len(nodes))
        weight = np.fromiter((node.weight for node in nodes), np.float64, len(nodes))
        _check_parents(trees, index, local, parent)
        _check_values(trees, index, local, length, weight)
        home = np.fromiter((-1 if node.home is None else node.home for node in nodes), np.int64, len(nodes))
        above = np.where(parent < 0, -1, parent + first)
        return cls(names, nodes, index, above, length - (local == 0), weight, home)

    def __len__(self) -> int:
        return len(self.nodes)

    @cached_property
    def has_path_columns(self) -> np.ndarray:
        """[n] bool, True for nodes with a column of the path (``Column.of_path``); the same on every rank."""
        names = [name for name, column in COLUMNS.items() if column.of_path]
        found = (any(name in node.tokens for name in names) for node in self.nodes)
        return np.fromiter(found, bool, len(self))

    @cached_property
    def depth(self) -> np.ndarray:
        """[n] int64, nodes above each node."""
        depth = np.zeros(len(self), dtype=np.int64)
        below = np.flatnonzero(self.parent >= 0)
        above = self.parent[below]
        while below.size:
            depth[below] += 1
            above = self.parent[above]
            below, above = below[above >= 0], above[above >= 0]
        return depth

    def levels(self) -> list[np.ndarray]:
        """Return the node indices of depth 0, 1, 2, ..."""
        order = np.argsort(self.depth, kind="stable")
        ends = np.cumsum(np.bincount(self.depth))
        return np.split(order, ends[:-1])

    @cached_property
    def position(self) -> np.ndarray:
        """[n] int64, positions of the path above each node."""
        position = np.zeros(len(self), dtype=np.int64)
        for level in self.levels()[1:]:
            above = self.parent[level]
            position[level] = position[above] + self.length[above]
        return position

    @cached_property
    def live(self) -> np.ndarray:
        """[n] bool, True if the node or a node below it is supervised."""
        live = self.weight > 0
        for level in reversed(self.levels()[1:]):
            live[self.parent[level[live[level]]]] = True
        return live

    @cached_property
    def segment(self) -> np.ndarray:
        """[n] int64, number of the supervised node in the batch, -1 where not supervised."""
        supervised = self.weight > 0
        return np.where(supervised, np.cumsum(supervised) - 1, -1)

    def row_order(self) -> np.ndarray:
        """Return the live nodes, tree after tree, each in depth-first order with the longest child first.

        A child's length is its longest path of live positions; ties keep the order of the tree's nodes.
        """
        length = np.where(self.live, self.length, 0)
        levels = self.levels()
        height, size = length.copy(), length.copy()
        for level in reversed(levels[1:]):
            above = self.parent[level]
            tallest = np.zeros(len(self), dtype=np.int64)
            np.maximum.at(tallest, above, height[level])
            height += tallest
            np.add.at(size, above, size[level])
        siblings = np.lexsort((np.arange(len(self)), -height, self.parent))
        before = np.cumsum(size[siblings]) - size[siblings]
        family = self.parent[siblings]
        eldest = np.r_[True, family[1:] != family[:-1]] if len(self) else np.zeros(0, bool)
        offset = np.empty(len(self), dtype=np.int64)
        offset[siblings] = before - np.maximum.accumulate(np.where(eldest, before, 0))
        start = np.zeros(len(self), dtype=np.int64)
        for level in levels[1:]:
            above = self.parent[level]
            start[level] = start[above] + length[above] + offset[level]
        order = np.lexsort((self.depth, start, self.tree))
        return order[self.live[order]]

    def path(self, node: int) -> list[int]:
        """Return the node and its ancestors, root first."""
        path = [node]
        while self.parent[path[-1]] >= 0:
            path.append(int(self.parent[path[-1]]))
        return path[::-1]

    def node(self, number: int) -> Node:
        """Return the node with this index in the forest."""
        return self.nodes[number]

    def of_segment(self, segment: int) -> tuple[str, int]:
        """Return the name of the tree and the index in it of the node with this number in ``segment``."""
        node = int(np.flatnonzero(self.segment == segment)[0])
        tree = int(self.tree[node])
        return self.names[tree], node - int(np.searchsorted(self.tree, tree))

    def where(self, node: int) -> str:
        """Return the node's name for messages."""
        tree = int(self.tree[node])
        return f"token tree {self.names[tree]!r}, node {node - int(np.searchsorted(self.tree, tree))}"

    def check_budget(self, max_tokens_per_row: int) -> None:
        """Raise TreeError if a live path does not fit into a row."""
        path = self.position + self.length
        over = np.flatnonzero(self.live & (path > max_tokens_per_row))
        if over.size:
            node = int(over[np.argmax(path[over])])
            raise TreeError(
                f"{self.where(node)}: the path that ends there takes {path[node]} positions; "
                f"a row has {max_tokens_per_row} (packing.max_tokens_per_row)"
            )


def leaf_chain_bounds(forest: Forest, order: np.ndarray) -> list[int]:
    """Return the bounds of the downward runs in one tree's row order that each end at a leaf, with 0 and the
    end."""
    cuts = np.flatnonzero(forest.parent[order[1:]] != order[:-1]) + 1
    return [0, *cuts.tolist(), len(order)]


def _check_roots(trees: Sequence[TokenTree]) -> None:
    for tree in trees:
        if not tree.nodes:
            raise TreeError(f"token tree {tree.name!r}: expected a root, found no nodes")
        root = tree.nodes[0]
        if root.parent != -1:
            raise TreeError(f"token tree {tree.name!r}, node 0: the root's parent is -1, found {root.parent}")
        if root.weight:
            raise TreeError(
                f"token tree {tree.name!r}, node 0: the root is the prompt and is not supervised, "
                f"found weight {root.weight}"
            )


def _check_parents(
    trees: Sequence[TokenTree], index: np.ndarray, local: np.ndarray, parent: np.ndarray
) -> None:
    for i in np.flatnonzero((local > 0) & ((parent < 0) | (parent >= local))):
        tree, node = trees[int(index[i])], int(local[i])
        where = f"token tree {tree.name!r}, node {node}"
        if not 0 <= parent[i] < len(tree.nodes):
            raise TreeError(
                f"{where}: its parent {parent[i]} is missing (the tree has {len(tree.nodes)} nodes)"
            )
        cycle = _cycle(tree, node)
        if cycle:
            raise TreeError(f"{where}: a cycle, {' -> '.join(map(str, cycle))}")
        raise TreeError(f"{where}: its parent {parent[i]} comes after it")


def _cycle(tree: TokenTree, node: int) -> list[int]:
    """Return the nodes from ``node`` up to the first repeated node, or [] if the path ends at a root."""
    seen = [node]
    while 0 <= tree.nodes[seen[-1]].parent < len(tree.nodes):
        seen.append(tree.nodes[seen[-1]].parent)
        if seen[-1] in seen[:-1]:
            return seen
    return []


def _check_values(
    trees: Sequence[TokenTree], index: np.ndarray, local: np.ndarray, length: np.ndarray, weight: np.ndarray
) -> None:
    nodes = [node for tree in trees for node in tree.nodes]
    advantage = np.fromiter((node.advantage for node in nodes), np.float64, len(nodes))
    problems: list[tuple[np.ndarray, str, np.ndarray | None]] = [
        (length == 0, "expected at least one token, found none", None),
        (~np.isfinite(weight) | (weight < 0), "expected a finite weight >= 0", weight),
    ]
    names = {
        name
        for node, trained in zip(nodes, weight > 0, strict=True)
        if trained
        for name in node.tokens.columns
    }
    for name in sorted({"logprobs", *(name for name in names if COLUMNS[name].needed_by == "loss")}):
        has = np.fromiter((name in node.tokens for node in nodes), bool, len(nodes))
        others = "" if name == "logprobs" else ", which other nodes of the batch have"
        problem = f"supervised (weight > 0), but without the column {name}{others}"
        problems.append(((weight > 0) & ~has, problem, None))
    infinite = (~np.isfinite(advantage), "the advantage is not finite", advantage)
    for wrong, problem, found in [*problems, infinite]:
        if wrong.any():
            i = int(np.argmax(wrong))
            detail = "" if found is None else f", found {found[i]}"
            error = NonFiniteTreeError if wrong is infinite[0] else TreeError
            raise error(f"token tree {trees[int(index[i])].name!r}, node {local[i]}: {problem}{detail}")
