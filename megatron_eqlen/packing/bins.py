"""Bin packing and balancing, on plain numbers."""

from __future__ import annotations

import heapq

import numpy as np


def first_fit_decreasing(sizes: np.ndarray, capacity: int) -> list[list[int]]:
    """Return bins of item numbers, none fuller than ``capacity``; every size is at most ``capacity``."""
    bins: list[list[int]] = []
    room = np.full(len(sizes), capacity, dtype=np.int64)
    for item in np.argsort(-sizes, kind="stable"):
        first = int(np.argmax(room >= sizes[item]))
        room[first] -= sizes[item]
        if first == len(bins):
            bins.append([])
        bins[first].append(int(item))
    return bins


def balance(costs: np.ndarray, ranks: int) -> list[list[int]]:
    """Return items for each rank with nearly equal cost: the costliest remaining item goes to the least
    loaded rank."""
    loads = [(0.0, rank) for rank in range(ranks)]
    items: list[list[int]] = [[] for _ in range(ranks)]
    for item in np.argsort(-costs, kind="stable"):
        load, rank = loads[0]
        heapq.heapreplace(loads, (load + float(costs[item]), rank))
        items[rank].append(int(item))
    return items
