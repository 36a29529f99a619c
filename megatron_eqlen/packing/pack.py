"""From token trees to rows: plan on node lengths, then fill only the rows that a rank trains.

    trees ─Forest.of─► nodes ─prune, cut─► parts ─balance─► ranks ─first-fit─► RowPlans ─fill_row─► Rows

Planning needs skeletons only; filling needs the arrays of the nodes that are in the row. A part is a whole
tree, or as many of its leaf chains as fit into a row together with the ancestors they need; a repeated
ancestor is context only, so every supervised token is in exactly one row. ``expanded`` makes a part of each
supervised node with its whole prefix: the naive layout, kept as the reference. Ranks are balanced on cost =
positions + pair_cost x (query, key) pairs that attention computes.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter
from typing import Literal

import numpy as np

from megatron_eqlen.packing.checks import check_loss_arrays
from megatron_eqlen.packing.row import fill_row
from megatron_eqlen.packing.tree import Forest
from megatron_eqlen.processes.collector import collector_paused
from megatron_eqlen.types import Metrics, Row, TokenTree

Layout = Literal["tree", "expanded"]
RowPlan = np.ndarray
"""Contents of a row: [p] int64, numbers of its parts."""

PAIR_COST = 3.3e-5
"""Cost of one visible (query, key) pair in positions, for Qwen3-32B (``plan.flops.pair_cost``)."""


@dataclass(frozen=True)
class Parts:
    """Units of placement, k of them: each a whole tree, or some of its leaf chains with their ancestors."""

    nodes: np.ndarray
    """[m] int64, forest indices in row order, part after part; an ancestor occurs once per part."""
    supervised: np.ndarray
    """[m] bool, nodes that are trained in the part unless their weight is 0."""
    starts: np.ndarray
    """[k + 1] int64, where each part begins in ``nodes``."""

    def sums(self, values: np.ndarray) -> np.ndarray:
        """Return [k]: for each part the sum of the nodes' values."""
        return np.add.reduceat(values[self.nodes], self.starts[:-1]) if len(self.nodes) else values[:0]

    def of(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return ``nodes`` and ``supervised`` of these parts alone, one after the other."""
        first, count = self.starts[numbers], np.diff(self.starts)[numbers]
        places = np.repeat(first + count - np.cumsum(count), count) + np.arange(int(count.sum()))
        return self.nodes[places], self.supervised[places]


@dataclass(frozen=True)
class Packing:
    """Placement of every node. ``ranks[r]`` are the rows of data-parallel rank r, equally many for all."""

    forest: Forest
    parts: Parts
    sizes: np.ndarray
    """[k] int64, positions that each part occupies."""
    ranks: list[list[RowPlan]]
    max_tokens_per_row: int
    multiple_of: int
    pair_cost: float

    def rows(self, rank: int, for_loss: bool = True) -> RankRows:
        """Return the rows of one data-parallel rank. Raises TreeError if arrays cannot be trained on."""
        if for_loss:
            check_loss_arrays(self.forest, self.needed(rank)[1])
        return RankRows(self, self.ranks[rank], for_loss)

    def fill(self, row: RowPlan, for_loss: bool = True) -> Row:
        """Return one row's arrays; ``for_loss`` as in ``fill_row``."""
        return fill_row(self.forest, *self.parts.of(row), self.length(row), for_loss)

    def needed(self, rank: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the nodes in a rank's rows, and those that it trains: [n] and [m] int64, ascending."""
        nodes, supervised = self.parts.of(np.concatenate(self.ranks[rank]))
        return np.unique(nodes), np.unique(nodes[supervised & (self.forest.weight[nodes] > 0)])

    def length(self, row: RowPlan) -> int:
        """Return the row's S: the positions in use, rounded up to ``multiple_of``."""
        return -(-max(1, int(self.sizes[row].sum())) // self.multiple_of) * self.multiple_of

    @cached_property
    def metrics(self) -> Metrics:
        """Token counts and utilisation of rows and ranks; ``fill`` counts every position equally.

        ``fill``: share of the computed positions that are not padding; ``budget_fill``: share of all rows'
        full budget; ``expanded_tokens``: positions of the same supervised nodes with separate prefixes.
        """
        rows = [row for rank in self.ranks for row in rank]
        used = int(self.sizes[np.concatenate(rows)].sum())
        computed = sum(self.length(row) for row in rows)
        # [ranks]: positions, and visible (query, key) pairs
        of_ranks, of_parts = [*map(np.concatenate, self.ranks)], self.parts.sums(pairs_seen(self.forest))
        positions = np.array([self.sizes[parts].sum() for parts in of_ranks])
        pairs = np.array([of_parts[parts].sum() for parts in of_ranks])
        costs = positions + self.pair_cost * pairs
        forest, trained = self.forest, self.forest.weight > 0
        unique = int(forest.length[forest.live].sum())
        return {
            "packing/rows": float(len(rows)),
            "packing/tokens": float(used),
            "packing/computed_tokens": float(computed),
            "packing/unique_tokens": float(unique),
            "packing/repeated_tokens": float(used - unique),
            "packing/context": float(pairs.sum() / max(used, 1)),
            "packing/pruned_tokens": float(forest.length[~forest.live].sum()),
            "packing/supervised_tokens": float(sum(n.tokens.generated for n in forest.nodes if n.weight > 0)),
            "packing/expanded_tokens": float((forest.position + forest.length)[trained].sum()),
            "packing/fill": used / computed,
            "packing/budget_fill": used / (len(rows) * self.max_tokens_per_row),
            "packing/max_over_mean_cost": float(costs.max() / costs.mean()) if costs.sum() else 1.0,
        }


class RankRows(Sequence[Row]):
    """Rows of a data-parallel rank, each filled when it is read, so that few are in memory at once."""

    def __init__(self, packing: Packing, plans: list[RowPlan], for_loss: bool) -> None:
        self.packing, self._plans, self._for_loss = packing, plans, for_loss
        self.route_agreement: Metrics | None = None
        """Agreement of the engine's experts with those of the first pass; None before it."""
        self.others: dict[str, list[np.ndarray]] = {}
        """``Row.others``: for each row [n] float64, at supervised positions; empty before the last stage."""

    def __len__(self) -> int:
        return len(self._plans)

    def __getitem__(self, at: int) -> Row:  # pyright: ignore[reportIncompatibleMethodOverride] (no slices)
        row = self.packing.fill(self._plans[at], self._for_loss)
        # [S] float64 from values at the supervised positions
        row.others = {policy: np.zeros(len(row.labels)) for policy, known in self.others.items() if known}
        for policy, column in row.others.items():
            column[row.weights > 0] = self.others[policy][at]
        return row


@collector_paused()
def plan_rows(
    trees: Sequence[TokenTree],
    max_tokens_per_row: int,
    data_parallel: int = 1,
    multiple_of: int = 1,
    layout: Layout = "tree",
    *,
    pair_cost: float = PAIR_COST,
    row_count_multiple_of: int = 1,
) -> Packing:
    """Assign nodes to rows, and rows to ranks. Deterministic.

    Every rank gets equally many rows, at least one and a multiple of ``row_count_multiple_of``; rows without
    a tree are padding. A row is as long as its tokens, rounded up to ``multiple_of``
    (``forward.row_multiple``). Raises TreeError on a bad tree or a path over the budget.
    """
    forest = Forest.of(trees)
    forest.check_budget(max_tokens_per_row)
    if layout == "tree":
        parts = _tree_parts(forest, max_tokens_per_row)
    else:
        trained = np.flatnonzero(forest.weight > 0)
        parts = _with_context(forest, trained, np.arange(len(trained)))
    # costs balance the ranks, sizes fill the rows
    costs = parts.sums(forest.length + pair_cost * pairs_seen(forest))
    sizes = parts.sums(forest.length)
    ranks: list[list[RowPlan]] = []
    for chosen in balance(costs, data_parallel):
        items = np.array(chosen, np.int64)
        rows = [items[row] for row in first_fit_decreasing(sizes[items], max_tokens_per_row)]
        # rows at the same place on different ranks get similar work
        ranks.append(sorted(rows, key=lambda row: -costs[row].sum()))
    # all ranks compute equally many rows, as their collectives require
    count = max([1, *map(len, ranks)])
    count += -count % row_count_multiple_of
    ranks = [rank + [np.zeros(0, np.int64)] * (count - len(rank)) for rank in ranks]
    return Packing(forest, parts, sizes, ranks, max_tokens_per_row, multiple_of, pair_cost)


def pairs_seen(forest: Forest) -> np.ndarray:
    """Return [n] float64: the (query, key) pairs of each node's queries."""
    return forest.length * forest.position + forest.length * (forest.length + 1) / 2


def _tree_parts(forest: Forest, budget: int) -> Parts:
    """Return runs of leaf chains in row order, each as long as fits with its ancestors, repeated as context.

    Deepest chains come first: each part reaches as far up as it can before the next part repeats a prefix. No
    other cut into consecutive chains repeats less of a stream.
    """
    order = forest.row_order()
    # [live nodes + 1] positions before each node; [chains] of downward runs that end at a leaf
    used = np.append(0, np.cumsum(forest.length[order]))
    chains = np.flatnonzero(forest.parent[order] != np.append(-2, order[:-1]))
    ends, above = used[np.append(chains, len(order))[1:]], forest.position[order[chains]]
    roots = forest.parent[order[chains]] < 0
    cuts, most = list[int](), 0
    columns = (column.tolist() for column in (chains, used[chains], ends, above, roots))
    for chain, begin, end, context, is_root in zip(*columns, strict=True):
        if is_root or end > most:
            cuts.append(chain)
            # the part may reach so far
            most = budget + begin - context
    return _with_context(forest, order, np.array(cuts, np.int64))


def _with_context(forest: Forest, nodes: np.ndarray, cuts: np.ndarray) -> Parts:
    """Return ``nodes`` cut at ``cuts``, each part behind the ancestors of its first node, as context."""
    part, above = np.arange(len(cuts)), forest.parent[nodes[cuts]]
    # (parts, their nodes), then those of the ancestors, level by level up to the roots
    levels = [(np.repeat(part, np.diff(cuts, append=len(nodes))), nodes)]
    while (some := above >= 0).any():
        part, above = part[some], above[some]
        levels.append((part, above))
        above = forest.parent[above]
    owner, found = map(np.concatenate, zip(*levels[::-1], strict=True))
    order = np.argsort(owner, kind="stable")
    starts = np.searchsorted(owner[order], np.arange(len(cuts) + 1))
    return Parts(found[order], order >= len(owner) - len(nodes), starts)


def first_fit_decreasing(sizes: np.ndarray, capacity: int) -> list[list[int]]:
    """Return bins of item numbers, none fuller than ``capacity``; every size is at most ``capacity``."""
    bins: list[list[int]] = []
    room = np.full(len(sizes), capacity, dtype=np.int64)
    for item, size in sorted(enumerate(map(int, sizes)), key=itemgetter(1), reverse=True):
        # an open bin, or the first empty one, which has room for any size
        first = int((room >= size).argmax())
        room[first] -= size
        if first == len(bins):
            bins.append([])
        bins[first].append(item)
    return bins


def balance(costs: np.ndarray, ranks: int) -> list[list[int]]:
    """Return items for each rank with nearly equal cost: the costliest goes to the least loaded rank."""
    loads = [(0.0, rank) for rank in range(ranks)]
    items: list[list[int]] = [[] for _ in range(ranks)]
    for item, cost in sorted(enumerate(map(float, costs)), key=itemgetter(1), reverse=True):
        load, rank = loads[0]
        heapq.heapreplace(loads, (load + cost, rank))
        items[rank].append(item)
    return items
