"""The packer on simulated streams of reasoning length: fill, balance, and its own CPU time.

Streams are simulated as the harvester makes them: response lengths are log-normal; the shorter of two
tracks ends a pair; the survivor goes on and the fork's length is drawn given that it is longer than the
trunk; a stream ends where both tracks end at once or reach the limit. Half of the pairs have equal
rewards and carry no weight.
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path
from typing import Any

import numpy as np

from megatron_eqlen.packing.pack import plan_rows
from megatron_eqlen.types import Node, TokenTree
from tools.benchmarks.table import show


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--streams", type=int, default=512)
    parser.add_argument("--data-parallel", type=int, default=8)
    parser.add_argument("--limit", type=int, default=32768, help="longest response, in tokens")
    parser.add_argument("--prompt", type=int, default=2048, help="longest prompt, in tokens")
    parser.add_argument("--medians", type=int, nargs="+", default=[1000, 4000, 12000], help="of responses")
    parser.add_argument("--budgets", type=int, nargs="+", help="default: once and twice the longest path")
    parser.add_argument("--repeat", type=int, default=5, help="the fastest of so many runs counts")
    parser.add_argument("--json", type=Path)


def run(args: argparse.Namespace) -> None:
    results = []
    for median in args.medians:
        rng = np.random.default_rng(0)
        trees = [simulated_stream(rng, i, median, args) for i in range(args.streams)]
        longest = args.prompt + args.limit
        budgets = args.budgets or [longest, 2 * longest]
        results += [measure(trees, median, budget, args) for budget in budgets]
    title = f"{args.streams} streams, data parallel {args.data_parallel}, responses up to {args.limit}"
    show(results, title, args.json)


def simulated_stream(
    rng: np.random.Generator, number: int, median: int, args: argparse.Namespace
) -> TokenTree:
    """One stream's token tree (all token ids are 0: the packer's work does not depend on them)."""
    ends = [response_length(rng, median, 0), response_length(rng, median, 0)]
    nodes, trunk, length = [Node(-1, [0] * int(rng.integers(64, args.prompt)))], 0, 0
    while length < min(ends) <= args.limit:
        side = [0] * (min(ends) - length)
        weight = float(rng.integers(0, 2))
        nodes += [Node(trunk, side, sign, weight, [0.0] * len(side)) for sign in (1.0, -1.0)]
        trunk, length = len(nodes) - 1, min(ends)
        ends = [max(ends), response_length(rng, median, length)]
    return TokenTree(f"stream {number}", nodes)


def response_length(rng: np.random.Generator, median: int, longer_than: int) -> int:
    """Log-normal with sigma 0.8, given that it is longer."""
    while True:
        draws = median * rng.lognormal(0.0, 0.8, 1000)
        longer = draws[draws > longer_than + 1]
        if longer.size:
            return int(longer[0])
        median = int(median * 1.5)


def fewest_rows(tokens: float, budget: int, ranks: int) -> int:
    """The smallest number of rows of ``budget`` for ``tokens`` positions, with equally many rows on each
    rank."""
    return math.ceil(tokens / budget / ranks) * ranks


def measure(trees: list[TokenTree], median: int, budget: int, args: argparse.Namespace) -> dict[str, Any]:
    planning, filling = [], []
    for _ in range(args.repeat):
        started = time.process_time()
        planned = plan_rows(trees, budget, args.data_parallel, multiple_of=8)
        planning.append(time.process_time() - started)
        started = time.process_time()
        rows = planned.rows(0)
        filling.append(time.process_time() - started)
    metrics = {name.removeprefix("packing/"): value for name, value in planned.metrics.items()}
    return {
        "median": median,
        "budget": budget,
        "rows": int(metrics["rows"]),
        "fewest": fewest_rows(metrics["tokens"], budget, args.data_parallel),
        "Mtokens": metrics["tokens"] / 1e6,
        "repeated": metrics["repeated_tokens"] / metrics["tokens"],
        "pruned": metrics["pruned_tokens"] / (metrics["pruned_tokens"] + metrics["unique_tokens"]),
        "expanded/tree": metrics["expanded_tokens"] / metrics["tokens"],
        "fill": metrics["fill"],
        "budget_fill": metrics["budget_fill"],
        "max/mean cost": metrics["max_over_mean_cost"],
        "plan ms": 1e3 * min(planning),
        "fill ms/row": 1e3 * min(filling) / len(rows),
    }
