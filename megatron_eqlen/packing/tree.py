"""Flat forest of token trees: checked, pruned, and put in row order.

``Forest.of(trees)`` reads the tens of thousands of nodes of a batch once into arrays. Of tokens it reads only
the number, so skeletons suffice. It relies on three exact facts:

* A node without a supervised node at or below it changes no loss and no gradient: it is pruned.
* Restricting depth-first order to a set of nodes that holds all its ancestors is depth-first order again.
* With the longest child first, a trunk is one contiguous piece of its row.
"""

from __future__ import annotations

from collections import defaultdict
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
        _check(trees)
        # [nodes]: number of the tree; of its first node; in the tree
        index = np.repeat(np.arange(len(trees)), counts)
        first = np.repeat(np.cumsum(counts) - counts, counts)
        local = np.arange(len(nodes)) - first
        parent = np.fromiter((node.parent for node in nodes), np.int64, len(nodes))
        length = np.fromiter(map(len, nodes), np.int64, len(nodes))
        weight = np.fromiter((node.weight for node in nodes), np.float64, len(nodes))
        home = np.fromiter((-1 if node.home is None else node.home for node in nodes), np.int64, len(nodes))
        # parents by number in the forest; a root's first token is an input alone
        above = np.where(parent < 0, -1, parent + first)
        return cls(names, nodes, index, above, length - (local == 0), weight, home)

    def __len__(self) -> int:
        return len(self.nodes)

    @cached_property
    def has_path_columns(self) -> np.ndarray:
        """[n] bool, True for nodes with a column of the path (``Column.of_path``); the same on every rank."""
        names = [name for name, column in COLUMNS.items() if column.of_path]
        holds = (any(name in node.tokens for name in names) for node in self.nodes)
        return np.fromiter(holds, bool, len(self))

    @cached_property
    def position(self) -> np.ndarray:
        """[n] int64, positions of the path above each node."""
        position = np.zeros(len(self), dtype=np.int64)
        # parents come first, so theirs are known
        for node, above in enumerate(self.parent.tolist()):
            if above >= 0:
                position[node] = position[above] + self.length[above]
        return position

    @cached_property
    def live(self) -> np.ndarray:
        """[n] bool, True if the node or a node below it is supervised."""
        live = self.weight > 0
        # children come last, so a parent hears of them
        for node in reversed(range(len(self))):
            if live[node] and self.parent[node] >= 0:
                live[self.parent[node]] = True
        return live

    @cached_property
    def segment(self) -> np.ndarray:
        """[n] int64, number of the supervised node in the batch, -1 where not supervised."""
        supervised = self.weight > 0
        return np.where(supervised, np.cumsum(supervised) - 1, -1)

    def row_order(self) -> np.ndarray:
        """Return the live nodes, tree after tree, each in depth-first order with the longest child first: the
        one with the longest path of live positions; ties keep the order of the tree's nodes."""
        parent, below = self.parent.tolist(), defaultdict[int, list[int]](list)
        # [nodes] live positions of the longest path down from each node, itself included
        height = np.where(self.live, self.length, 0).tolist()
        for node in np.flatnonzero(self.live)[::-1].tolist():
            if node in below:
                height[node] += max(height[child] for child in below[node])
            below[parent[node]].append(node)
        # depth first: the top of the stack is the longest child
        order, rest = list[int](), below.pop(-1, [])
        while rest:
            order.append(rest.pop())
            if order[-1] in below:
                rest += sorted(below[order[-1]], key=height.__getitem__)
        return np.array(order, np.int64)

    def path(self, node: int) -> list[int]:
        """Return the node and its ancestors, root first."""
        path = [node]
        while self.parent[path[-1]] >= 0:
            path.append(int(self.parent[path[-1]]))
        return path[::-1]

    def node(self, number: int) -> Node:
        return self.nodes[number]

    def of_segment(self, segment: int) -> tuple[str, int]:
        """Return the name of the tree and the index in it of the node with this number in ``segment``."""
        return self._place(int(np.flatnonzero(self.segment == segment)[0]))

    def where(self, node: int) -> str:
        """Return the node's name for messages."""
        tree, number = self._place(node)
        return f"token tree {tree!r}, node {number}"

    def _place(self, node: int) -> tuple[str, int]:
        tree = int(self.tree[node])
        return self.names[tree], node - int(np.searchsorted(self.tree, tree))

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


def _check(trees: Sequence[TokenTree]) -> None:
    """Raise TreeError for a node before its parent, or supervised without a column that the loss reads."""
    trained = [node for tree in trees for node in tree.nodes if node.weight > 0]
    # a column that the loss reads must be on every trained node, once one has it
    names = set[str]().union(*(node.tokens.columns for node in trained))
    names = {"logprobs", *(name for name in names if COLUMNS[name].needed_by == "loss")}
    where = "token tree {!r}, node {}".format
    for tree in trees:
        for number, node in enumerate(tree.nodes):
            if not (0 <= node.parent < number if number else node.parent == -1):
                expected = f"expected a parent before it (-1: the root), found {node.parent}"
                raise TreeError(f"{where(tree.name, number)}: {expected}")
            if node.weight > 0 and not names <= node.tokens.columns.keys():
                missing = min(names - node.tokens.columns.keys())
                others = "" if missing == "logprobs" else ", which other nodes of the batch have"
                cause = f"supervised (weight > 0) without the column {missing}{others}"
                raise TreeError(f"{where(tree.name, number)}: {cause}")
