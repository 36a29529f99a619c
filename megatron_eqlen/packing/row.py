"""Fill a row's arrays from its nodes, in the layout that ``types.Row`` documents."""

from __future__ import annotations

import numpy as np

from megatron_eqlen.packing.tree import Forest
from megatron_eqlen.tokens import COLUMNS, Ragged, Tokens, Values
from megatron_eqlen.types import Row, RowNode


def fill_row(
    forest: Forest, nodes: np.ndarray, supervised: np.ndarray, length: int, for_loss: bool = True
) -> Row:
    """Lay out ``nodes`` consecutively and pad to ``length`` positions. ``nodes`` [m] int64 are forest indices
    of whole or partial trees in depth-first order, ancestors included; ``supervised`` [m] bool marks those
    that are trained here. ``for_loss``: fill in the columns that only the loss reads."""
    # a one-token prompt occupies no position: its children are roots of the row
    some = forest.length[nodes] > 0
    nodes, trained = nodes[some], (supervised & (forest.weight[nodes] > 0))[some]
    places = _places(forest, nodes)
    used = int(forest.length[nodes].sum())
    assert used <= length, f"{used} positions do not fit into a row of {length}"
    row = Row(
        input_ids=np.zeros(length, np.int64),
        position_ids=np.zeros(length, np.int64),
        labels=np.zeros(length, np.int64),
        visible_until=np.arange(1, length + 1),
        segment_ids=np.full(length, -1, np.int64),
        advantages=np.zeros(length),
        weights=np.zeros(length),
        nodes=places,
        num_tokens=used,
    )
    for number, place, train in zip(nodes.tolist(), places, trained.tolist(), strict=True):
        node, at = forest.node(number), slice(place.start, place.start + place.length)
        # labels are the node's tokens (a root's without the first), inputs the tokens before them on the path
        root = len(node) - place.length
        before = node.token_ids[0] if root else forest.node(int(forest.parent[number])).token_ids[-1]
        row.labels[at] = node.token_ids[root:]
        row.input_ids[at] = np.append(before, row.labels[at][:-1])
        row.position_ids[at] = place.position + np.arange(place.length)
        generated = node.tokens.is_generated[root:]
        _fill_path_columns(row, at, node.tokens, root, generated)
        if train:
            # positions that predict a token of an environment are not trained
            own = place.start + np.flatnonzero(generated)
            row.segment_ids[own] = forest.segment[number]
            row.advantages[own], row.weights[own] = node.advantage, forest.weight[number]
    # each node is visible to the end of its subtree
    for place in reversed(places):
        end = max(place.start + place.length, int(row.visible_until[place.start]))
        row.visible_until[place.start : place.start + place.length] = end
        if place.parent >= 0:
            above = places[place.parent].start
            row.visible_until[above] = max(row.visible_until[above], end)
    if for_loss:
        row.columns = _columns(forest, nodes[trained], row.segment_ids >= 0)
    return row


def _places(forest: Forest, nodes: np.ndarray) -> list[RowNode]:
    places: list[RowNode] = []
    latest: dict[int, int] = {}  # the latest copy: another part of the same tree may lie in this row
    start = 0
    for node, above in zip(nodes.tolist(), forest.parent[nodes].tolist(), strict=True):
        parent, latest[node] = latest.get(above, -1), len(places)
        depth = places[parent].depth + 1 if parent >= 0 else 0
        places.append(RowNode(start, int(forest.length[node]), parent, depth, int(forest.position[node])))
        start += places[-1].length
    return places


def _fill_path_columns(row: Row, at: slice, tokens: Tokens, root: int, generated: np.ndarray) -> None:
    """Fill ``Row.path_columns`` of a node's positions; tokens that were not generated have no known value."""
    for name, values in tokens.columns.items():
        if COLUMNS[name].of_path and not isinstance(values, Ragged):
            shape, unknown = (len(row.labels), *values.shape[1:]), COLUMNS[name].unknown
            if name not in row.path_columns:
                row.path_columns[name] = np.full(shape, unknown, np.int16)
            # [positions of the node, MoE layers of this rank, top_k]
            own = row.path_columns[name][at]
            own[:] = values[root:]
            own[~generated] = unknown


def _columns(forest: Forest, nodes: np.ndarray, supervised: np.ndarray) -> dict[str, Values]:
    """Return ``Row.columns`` of ``nodes``, which lie at the ``supervised`` positions ([S] bool)."""
    if not len(nodes):
        return {}
    tables = [forest.node(node).tokens for node in nodes]
    tokens, generated = Tokens.joined(tables), np.concatenate([table.is_generated for table in tables])
    columns: dict[str, Values] = {}
    for name, values in tokens.columns.items():
        if COLUMNS[name].needed_by != "loss":
            continue
        if isinstance(values, Ragged):
            # tokens of an environment have no lists
            wide = np.float64 if values.values.dtype.kind == "f" else np.int64
            columns[name] = Ragged(values.values.astype(wide), values.counts[generated].astype(np.int64))
            continue
        wide = np.float64 if values.dtype.kind == "f" else np.int64
        # [S]
        spread = columns[name] = np.full(len(supervised), COLUMNS[name].unknown, wide)
        spread[supervised] = values[generated]
    return columns
