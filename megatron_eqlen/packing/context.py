"""Context parallelism of a row: the positions of each rank, and the keys that they see.

The row is cut into 2 N slices of equal length, as Megatron's layers need equally many positions on all N
ranks. Each rank gets two slices: the slice whose queries see the most keys with the slice whose queries see
the fewest, the second with the last but one, ... All ranks then have equally many tokens and nearly equal
attention. (For one causal sequence these are the zigzag pairs.)
"""

from __future__ import annotations

import math

import numpy as np

Span = tuple[int, int]
"""Positions of a row: first (inclusive) and last (exclusive)."""
BLOCK = 128
"""Size of FlexAttention's blocks of queries and keys."""


def slices_of_ranks(position_ids: np.ndarray, ranks: int) -> list[tuple[Span, Span]]:
    """Return each rank's two slices of a row, in row order. ``position_ids``: ``Row.position_ids``, whose
    length is a multiple of 2 x ``ranks``."""
    size, rest = divmod(len(position_ids), 2 * ranks)
    assert not rest, f"a row of {len(position_ids)} positions cannot be cut into {2 * ranks} slices"
    seen = position_ids.reshape(2 * ranks, size).sum(1)  # a query sees its path
    order = np.argsort(-seen, kind="stable").tolist()
    pairs = (sorted(pair) for pair in zip(order[:ranks], order[: -ranks - 1 : -1], strict=True))
    return [((a * size, (a + 1) * size), (b * size, (b + 1) * size)) for a, b in pairs]


def keys_of_ranks(slices: list[tuple[Span, Span]], visible_until: np.ndarray) -> list[np.ndarray]:
    """Return for each rank [S] bool: the keys that its queries see, and all keys in the same blocks (of BLOCK
    positions if slices are whole blocks). ``visible_until``: ``Row.visible_until``."""
    start, end = slices[0][0]
    unit = math.gcd(end - start, BLOCK)
    return [_seen_by(spans, visible_until).reshape(-1, unit).any(1).repeat(unit) for spans in slices]


def _seen_by(slices: tuple[Span, Span], visible_until: np.ndarray) -> np.ndarray:
    at, seen = np.arange(len(visible_until)), np.zeros(len(visible_until), bool)
    for start, end in slices:
        seen |= np.maximum(at, start) < np.minimum(visible_until, end)
    return seen
