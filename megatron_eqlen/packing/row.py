"""Fill a row's arrays from its nodes, in the layout that ``types.Row`` documents."""

from __future__ import annotations

import numpy as np

from megatron_eqlen.packing.tree import Forest
from megatron_eqlen.tokens import COLUMNS, Ragged, Tokens, Values
from megatron_eqlen.types import Row, RowNode


def fill_row(
    forest: Forest, nodes: np.ndarray, supervised: np.ndarray, length: int, for_loss: bool = True
) -> Row:
    """Lay out ``nodes`` consecutively and pad to ``length`` positions.

    ``nodes`` [m] int64 are forest indices of whole or partial trees in depth-first order, ancestors included;
    ``supervised`` [m] bool marks the nodes that are trained here (the others are context). ``for_loss``: fill
    in the columns that only the loss reads.
    """
    lengths = forest.length[nodes]
    starts = np.cumsum(lengths) - lengths
    used = int(lengths.sum())
    assert used <= length, f"{used} positions do not fit into a row of {length}"
    above, ends = _ancestry(forest, nodes, starts, lengths)
    labels = _labels(forest, nodes, used)
    row = Row(
        input_ids=np.zeros(length, np.int64),
        position_ids=np.zeros(length, np.int64),
        labels=np.zeros(length, np.int64),
        visible_until=np.arange(1, length + 1),
        segment_ids=np.full(length, -1, np.int64),
        advantages=np.zeros(length),
        weights=np.zeros(length),
        nodes=_row_nodes(forest, nodes, above, starts),
        num_tokens=used,
    )
    # tokens and the tree, of all nodes
    row.labels[:used] = labels
    row.input_ids[:used] = _inputs(forest, nodes, labels, starts, lengths)
    row.position_ids[:used] = np.arange(used) + np.repeat(forest.position[nodes] - starts, lengths)
    row.visible_until[:used] = np.repeat(ends, lengths)
    # loss, of trained nodes only
    trained = supervised & (forest.weight[nodes] > 0)
    generated = _generated(forest, nodes, lengths)
    row.segment_ids[:used] = np.where(
        generated, np.repeat(np.where(trained, forest.segment[nodes], -1), lengths), -1
    )
    row.advantages[:used] = _advantages(forest, nodes, trained, generated, lengths)
    row.weights[:used] = np.repeat(np.where(trained, forest.weight[nodes], 0.0), lengths) * generated
    row.path_columns = _path_columns(forest, nodes, starts, length, generated)
    if for_loss:
        row.columns = _columns(forest, nodes[trained], row.segment_ids >= 0)
    return row


def _generated(forest: Forest, nodes: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return [used] bool, False for the positions that predict a token of an environment."""
    generated = np.ones(int(lengths.sum()), bool)
    for node, start, length in zip(nodes.tolist(), np.cumsum(lengths) - lengths, lengths, strict=True):
        tokens = forest.node(node).tokens
        if len(tokens) > tokens.generated:
            generated[start : start + length] = tokens.is_generated
    return generated


def _advantages(
    forest: Forest, nodes: np.ndarray, trained: np.ndarray, generated: np.ndarray, lengths: np.ndarray
) -> np.ndarray:
    """Return the advantage of each position, 0 outside trained nodes and for tokens of an environment."""
    of_nodes = [forest.node(node).advantage if use else 0.0 for node, use in zip(nodes, trained, strict=True)]
    by_token = {i: values for i, values in enumerate(of_nodes) if isinstance(values, np.ndarray)}
    numbers = [0.0 if i in by_token else values for i, values in enumerate(of_nodes)]
    advantages = np.repeat(np.array(numbers, np.float64), lengths) * generated
    starts = np.cumsum(lengths) - lengths
    for i, values in by_token.items():
        advantages[starts[i] : starts[i] + lengths[i]][generated[starts[i] : starts[i] + lengths[i]]] = values
    return advantages


def _ancestry(
    forest: Forest, nodes: np.ndarray, starts: np.ndarray, lengths: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return each node's parent in the row (-1: none) and the end of its subtree."""
    above = np.full(len(nodes), -1, np.int64)
    latest: dict[int, int] = {}
    for i, (node, parent) in enumerate(zip(nodes.tolist(), forest.parent[nodes].tolist(), strict=True)):
        # the latest copy: another part of the same tree may lie in this row
        above[i] = latest.get(parent, -1)
        latest[node] = i
    ends = starts + lengths
    for i in range(len(nodes) - 1, -1, -1):
        if above[i] >= 0:
            ends[above[i]] = max(ends[above[i]], ends[i])
    return above, ends


def _row_nodes(forest: Forest, nodes: np.ndarray, above: np.ndarray, starts: np.ndarray) -> list[RowNode]:
    """Return the nodes that occupy positions. A one-token prompt occupies none: its children are roots of the
    row."""
    number = np.cumsum(forest.length[nodes] > 0) - 1
    row_nodes: list[RowNode] = []
    columns = (nodes, forest.length[nodes], above, starts, forest.position[nodes])
    for _node, length, parent, start, position in zip(*(column.tolist() for column in columns), strict=True):
        if length == 0:
            continue
        empty = parent < 0 or forest.length[nodes[parent]] == 0
        parent = -1 if empty else int(number[parent])
        depth = 0 if empty else row_nodes[parent].depth + 1
        row_nodes.append(RowNode(start=start, length=length, parent=parent, depth=depth, position=position))
    return row_nodes


def _labels(forest: Forest, nodes: np.ndarray, used: int) -> np.ndarray:
    """Return [used] int64: the nodes' tokens; a root's first token is left out."""
    roots = (forest.parent[nodes] < 0).tolist()
    tokens = [forest.node(node).token_ids[root:] for node, root in zip(nodes, roots, strict=True)]
    labels = np.concatenate([np.zeros(0, np.int64), *tokens])
    assert len(labels) == used
    return labels


def _inputs(
    forest: Forest, nodes: np.ndarray, labels: np.ndarray, starts: np.ndarray, lengths: np.ndarray
) -> np.ndarray:
    """Return [used] int64: the input of each position, which is the token before its label on the path."""
    # [nodes] last token before each node; the root's first token has no label
    before = np.fromiter(
        (
            forest.node(node).token_ids[0] if parent < 0 else forest.node(parent).token_ids[-1]
            for node, parent in zip(nodes, forest.parent[nodes], strict=True)
        ),
        np.int64,
        len(nodes),
    )
    inputs = np.empty_like(labels)
    # within a node the input is the label before it
    inputs[1:] = labels[:-1]
    inputs[starts[lengths > 0]] = before[lengths > 0]
    return inputs


def _path_columns(
    forest: Forest, nodes: np.ndarray, starts: np.ndarray, length: int, generated: np.ndarray
) -> dict[str, np.ndarray]:
    """Return ``Row.path_columns`` of a row of ``length`` positions; ``generated`` as in ``_generated``."""
    columns: dict[str, np.ndarray] = {}
    for start, node, root in zip(starts.tolist(), nodes.tolist(), forest.parent[nodes] < 0, strict=True):
        for name, values in forest.node(node).tokens.columns.items():
            if not COLUMNS[name].of_path:
                continue
            # positions stand for labels, and a root's first token is none
            values = values[int(root) :]
            if name not in columns:
                columns[name] = np.full((length, *values.shape[1:]), COLUMNS[name].unknown, np.int16)
            columns[name][start : start + len(values)] = values
    for name, values in columns.items():
        # tokens that nobody sampled have no known value
        values[: len(generated)][~generated] = COLUMNS[name].unknown
    return columns


def _columns(forest: Forest, nodes: np.ndarray, supervised: np.ndarray) -> dict[str, Values]:
    """Return what the loss needs of the tokens of ``nodes``, which lie at the ``supervised`` positions ([S]
    bool), as ``Row.columns``."""
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
        spread = columns[name] = np.full(len(supervised), COLUMNS[name].unknown, wide)
        spread[supervised] = values[generated]
    return columns
