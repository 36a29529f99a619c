"""Flat forest of token trees: checked, pruned, and put in row order.

``Forest.of(trees)`` reads the tens of thousands of nodes of a batch once into arrays. Of tokens it reads only
the number, so skeletons suffice. It relies on three exact facts:

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
        """Return the checked forest of ``trees``. Raises TreeError on an invalid tree."""
        nodes = [node for tree in trees for node in tree.nodes]
        counts = np.array([len(tree.nodes) for tree in trees], dtype=np.int64)
        # [nodes]: number of the tree; of its first node
        index = np.repeat(np.arange(len(trees)), counts)
        first = np.repeat(np.cumsum(counts) - counts, counts)
        parent = np.fromiter((node.parent for node in nodes), np.int64, len(nodes))
        length = np.fromiter((len(node.tokens) for node in nodes), np.int64, len(nodes))
        weight = np.fromiter((node.weight for node in nodes), np.float64, len(nodes))
        home = np.fromiter((-1 if node.home is None else node.home for node in nodes), np.int64, len(nodes))
        # parents by number in the forest; a root's first token is an input alone
        is_root = np.arange(len(nodes)) == first
        above = np.where(parent < 0, -1, parent + first)
        forest = cls([tree.name for tree in trees], nodes, index, above, length - is_root, weight, home)
        forest._check(np.where(is_root, parent == -1, (parent >= 0) & (above < np.arange(len(nodes)))))
        return forest

    def __len__(self) -> int:
        return len(self.nodes)

    @cached_property
    def has_path_columns(self) -> np.ndarray:
        """[n] bool, True for nodes with a column of the path (``Column.of_path``); the same on every rank."""
        holds = (any(COLUMNS[name].of_path for name in node.tokens.columns) for node in self.nodes)
        return np.fromiter(holds, bool, len(self))

    @cached_property
    def position(self) -> np.ndarray:
        """[n] int64, positions of the path above each node."""
        return self._along(self.length) - self.length

    def _along(self, values: np.ndarray) -> np.ndarray:
        """Return [n], the sums of int64 ``values`` along the path to each node, itself included."""
        # above a root (-1) stands the last entry, 0; each round doubles the nodes that are summed
        sums, above = np.append(values, 0), np.append(self.parent, -1)
        while (above >= 0).any():
            sums, above = sums + sums[above], above[above]
        return sums[:-1]

    def _below(self, combine: np.ufunc, values: np.ndarray) -> np.ndarray:
        """Return [n], the ``values`` of each node and all nodes below it, combined."""
        depth, values = self._along(np.ones_like(self.parent)), values.copy()
        for level in range(int(depth.max(initial=1)), 1, -1):
            nodes = np.flatnonzero(depth == level)
            combine.at(values, self.parent[nodes], values[nodes])
        return values

    @cached_property
    def live(self) -> np.ndarray:
        """[n] bool, True if the node or a node below it is supervised."""
        return self._below(np.logical_or, self.weight > 0)

    @cached_property
    def segment(self) -> np.ndarray:
        """[n] int64, number of the supervised node in the batch, -1 where not supervised."""
        supervised = self.weight > 0
        return np.where(supervised, np.cumsum(supervised) - 1, -1)

    def row_order(self) -> np.ndarray:
        """Return the live nodes, tree after tree, each in depth-first order with the longest child first: the
        one with the longest path of live positions; ties keep the order of the tree's nodes."""
        parent, live = self.parent, np.flatnonzero(self.live)
        # [nodes]: end of the longest path of live positions; number of live nodes
        ends = self._below(np.maximum, (self.position + self.length) * self.live)
        size = self._below(np.add, self.live.astype(np.int64))
        # siblings side by side, each with the number of live nodes before it and the ones of its parents
        siblings = live[np.lexsort((np.where(parent < 0, 0, -ends)[live], parent[live]))]
        before, above = np.cumsum(size[siblings]) - size[siblings], parent[siblings]
        before -= before[np.searchsorted(above, above)]
        # a node's place is one behind its parent's, and behind its elder siblings' subtrees
        steps = np.zeros_like(parent)
        steps[siblings] = before + (above >= 0)
        order = np.empty_like(live)
        order[self._along(steps)[live]] = live
        return order

    def node(self, number: int) -> Node:
        return self.nodes[number]

    def of_segment(self, segment: int) -> tuple[str, int]:
        """Return the name of the tree and the index in it of the node with this number in ``segment``."""
        return self._place(int(np.flatnonzero(self.segment == segment)[0]))

    def where(self, node: int) -> str:
        """Return the node's name for messages."""
        return "token tree {!r}, node {}".format(*self._place(node))

    def _place(self, node: int) -> tuple[str, int]:
        tree = int(self.tree[node])
        return self.names[tree], node - int(np.searchsorted(self.tree, tree))

    def check_budget(self, max_tokens_per_row: int) -> None:
        """Raise TreeError if a live path does not fit into a row."""
        path = self.position + self.length
        over = np.flatnonzero(self.live & (path > max_tokens_per_row))
        if over.size:
            node = int(over[np.argmax(path[over])])
            takes = f"the path that ends there takes {path[node]} positions"
            has = f"a row has {max_tokens_per_row} (packing.max_tokens_per_row)"
            raise TreeError(f"{self.where(node)}: {takes}; {has}")

    def _check(self, fits: np.ndarray) -> None:
        """Raise TreeError for a node whose parent does not fit, or supervised without a column of the loss.
        ``fits``: [n] bool, True for roots without a parent, and others with one before them."""
        if not fits.all():
            node = int(np.argmin(fits))
            expected = "expected a parent before it (-1: the root), found "
            raise TreeError(f"{self.where(node)}: {expected}{self.nodes[node].parent}")
        trained: list[int] = np.flatnonzero(self.weight > 0).tolist()
        # a column that the loss reads must be on every trained node, once one has it
        known = {tuple(self.nodes[node].tokens.columns) for node in trained}
        names = {"logprobs", *(name for own in known for name in own if COLUMNS[name].needed_by == "loss")}
        if all(names.issubset(own) for own in known):
            return
        node = next(node for node in trained if not names.issubset(self.nodes[node].tokens.columns))
        missing = min(names - self.nodes[node].tokens.columns.keys())
        others = "" if missing == "logprobs" else ", which other nodes of the batch have"
        cause = f"supervised (weight > 0) without the column {missing}{others}"
        raise TreeError(f"{self.where(node)}: {cause}")
