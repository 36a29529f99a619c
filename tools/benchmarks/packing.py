"""The packer on simulated streams of reasoning length: fill, balance, and its own CPU time."""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path
from typing import Any

import numpy as np

from megatron_eqlen.packing.pack import plan_rows
from megatron_eqlen.packing.simulated import simulated_stream
from megatron_eqlen.types import TokenTree
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
        trees = [simulated_stream(rng, i, median, args.limit, args.prompt) for i in range(args.streams)]
        longest = args.prompt + args.limit
        budgets = args.budgets or [longest, 2 * longest]
        results += [measure(trees, median, budget, args) for budget in budgets]
    title = f"{args.streams} streams, data parallel {args.data_parallel}, responses up to {args.limit}"
    show(results, title, args.json)


def fewest_rows(tokens: float, budget: int, ranks: int) -> int:
    """Return the smallest number of rows of ``budget`` for ``tokens`` positions, with equally many rows on
    each rank."""
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
