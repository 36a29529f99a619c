"""The plan's estimates of speed beside public measurements: the fit to one half, the errors on the other.

Every second row of each kind in ``measurements.yaml`` is fitted, from the first on; the others are held out.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from math import exp, log
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import yaml

from megatron_eqlen.hf.config import ModelConfig, read_config
from megatron_eqlen.plan.model import KNOWN_MODELS
from megatron_eqlen.plan.speed import (
    GPUS,
    INTERVAL,
    REACHED,
    Decoding,
    Demand,
    Gpu,
    Reached,
    decoding,
    demand,
)
from megatron_eqlen.plan.workload import Workload
from megatron_eqlen.recipe import Recipe
from tools.benchmarks.table import show

MEASUREMENTS = Path(__file__).with_name("measurements.yaml")
Kind = Literal["training", "decoding", "serving", "step"]
GPUS_PER_NODE = 8
PROMPT = 110
"""Tokens of a prompt in the rows of kind ``step``."""
SHARES = tuple(round(0.01 * number, 2) for number in range(5, 101))
FLOORS = tuple(round(0.0005 * number, 4) for number in range(41))
"""Values that the fit tries: shares to the percent, the floor of a decode step to half a millisecond."""
START = Reached(0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.005)


@dataclass(frozen=True)
class Measurement:
    """A row of ``measurements.yaml``, and the work that the plan counts for it."""

    kind: Kind
    source: str
    model: str
    gpu: str
    gpus: int
    measured: float
    """In the unit of its kind."""
    overlap: bool
    need: Demand | Decoding
    units: float
    """The estimate is this over the seconds for rates, times the seconds for times."""

    def estimate(self, reached: Reached) -> float:
        if isinstance(self.need, Decoding):
            return self.units * self.need.seconds(reached)
        generation, training = self.need.generation(reached), self.need.training(reached)
        if self.kind == "step":
            return max(generation, training) if self.overlap else generation + training
        return self.units / (training if self.kind == "training" else generation)

    def error(self, reached: Reached) -> float:
        """Return log(estimate / measured)."""
        return log(self.estimate(reached) / self.measured)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", type=Path)


def run(args: argparse.Namespace) -> None:
    rows = measurements()
    reached = fit([row for number, row in rows if not number % 2])
    results = [
        {
            "kind": row.kind, "source": row.source, "model": row.model, "gpus": f"{row.gpus} {row.gpu}",
            "half": "held out" if number % 2 else "fitted", "measured": row.measured,
            "estimate": row.estimate(reached), "ratio": exp(row.error(reached)),
        }
        for number, row in rows
    ]  # fmt: skip
    show(results, f"{len(rows)} public measurements ({MEASUREMENTS.name} has their settings)", args.json)
    print("\nfit:", ", ".join(f"{field.name} {getattr(reached, field.name):g}" for field in fields(reached)))
    print("the plan's constants:", "the same" if reached == REACHED else f"{REACHED}: DIFFERENT")
    for half, odd in (("fitted", 0), ("held out", 1)):
        for kind in (*get_args(Kind), None):
            chosen = [row for number, row in rows if number % 2 == odd and kind in (row.kind, None)]
            median, most = errors(chosen, reached)
            print(
                f"{half:8}  {kind or 'all':8}  {len(chosen):2} rows  |log ratio|: median {median:.2f} "
                f"(x {exp(median):.2f}), 90% quantile {most:.2f} (x {exp(most):.2f})"
            )
    median, most = unseen([row for _, row in rows])
    print(
        f"each source's rows under a fit to all others: median {median:.2f} (x {exp(median):.2f}), "
        f"90% quantile {most:.2f} (x {exp(most):.2f}); the plan's interval: {INTERVAL}"
    )


def unseen(rows: Sequence[Measurement]) -> tuple[float, float]:
    """Return the errors of each source's rows under a fit to the rows of all other sources."""
    sizes = []
    for source in {row.source: None for row in rows}:
        reached = fit([row for row in rows if row.source != source])
        sizes += [abs(row.error(reached)) for row in rows if row.source == source]
    return float(np.median(sizes)), float(np.quantile(sizes, 0.9))


def errors(rows: Sequence[Measurement], reached: Reached) -> tuple[float, float]:
    """Return the median and the 90% quantile of |log(estimate / measured)|."""
    sizes = [abs(row.error(reached)) for row in rows]
    return float(np.median(sizes)), float(np.quantile(sizes, 0.9))


def fit(rows: Sequence[Measurement]) -> Reached:
    """Return the shares with the smallest sum of squared log ratios, one share after the other until none
    changes. Deterministic."""

    def loss(reached: Reached) -> float:
        return sum(row.error(reached) ** 2 for row in rows)

    best = START
    while True:
        before = best
        for field in fields(Reached):
            values = FLOORS if field.name == "floor" else SHARES
            best = min((replace(best, **{field.name: value}) for value in values), key=loss)
        if best == before:
            return best


def measurements(file: Path = MEASUREMENTS) -> list[tuple[int, Measurement]]:
    """Return the rows of ``file``, numbered within their kind."""
    raw = yaml.safe_load(file.read_text(encoding="utf-8"))
    return [
        (number, _measurement(kind, row, _model(file, row["model"])))
        for kind in get_args(Kind)
        for number, row in enumerate(raw[kind])
    ]


@cache
def _model(file: Path, name: str) -> ModelConfig:
    changes = dict(yaml.safe_load(file.read_text(encoding="utf-8"))["models"][name])
    model = read_config(KNOWN_MODELS / f"{changes.pop('like')}.json")
    layers = changes.get("num_hidden_layers", model.num_hidden_layers)
    if model.experts:
        changes["experts"] = replace(model.experts, layers=(True,) * layers, **changes.get("experts", {}))
    return replace(model, **changes)


def _measurement(kind: Kind, row: dict[str, Any], model: ModelConfig) -> Measurement:
    gpu = next(gpu for gpu in GPUS if gpu.name == row["gpu"])
    gpus = row.get("gpus", row["settings"].get("rollout.tensor_parallel", 1))
    recipe = _recipe(kind, row, gpus)
    need, units = _NEEDS[kind](recipe, model, row, gpu)
    overlap = recipe.rollout.staleness > 0
    generating = len(recipe.rollout.servers) * recipe.rollout.tensor_parallel
    return Measurement(
        kind, row["source"], row["model"], gpu.name, gpus + generating, row["measured"], overlap, need, units
    )


def _training(recipe: Recipe, model: ModelConfig, row: dict[str, Any], gpu: Gpu) -> tuple[Demand, float]:
    positions = row["rows"] * recipe.packing.max_tokens_per_row
    work = Workload(1, 1.0, positions, row["length"] / 2, row["length"])
    return demand(recipe, model, work, gpu), positions / recipe.world_size


def _decoding(recipe: Recipe, model: ModelConfig, row: dict[str, Any], gpu: Gpu) -> tuple[Decoding, float]:
    return decoding(recipe, model, gpu, row["requests"], row["context"]), 1e3


def _serving(recipe: Recipe, model: ModelConfig, row: dict[str, Any], gpu: Gpu) -> tuple[Demand, float]:
    context, generated = row["prompt"] + row["response"] / 2, row["requests"] * row["response"]
    work = Workload(row["requests"], generated, 1.0, context, context, row["requests"] * row["prompt"])
    return demand(recipe, model, work, gpu), generated


def _step(recipe: Recipe, model: ModelConfig, row: dict[str, Any], gpu: Gpu) -> tuple[Demand, float]:
    rollouts, context = row["prompts"] * row["group"], PROMPT + row["response"] / 2
    generated = rollouts * row["response"]
    work = Workload(
        rollouts, generated, generated + rollouts * PROMPT, context, context, row["prompts"] * PROMPT
    )
    return demand(recipe, model, work, gpu), 1.0


_NEEDS = {"training": _training, "decoding": _decoding, "serving": _serving, "step": _step}


def _recipe(kind: Kind, row: dict[str, Any], gpus: int) -> Recipe:
    """Return the row's settings as a recipe; engines of one node or more each, as the source ran them."""
    limit = row.get("limit", row.get("length", 4096))
    keys: dict[str, Any] = {
        "name": "measured",
        "steps": 1,
        "sampling": "independent",
        "model.path": row["model"],
        "data.max_prompt_length": 2 * PROMPT,
        "data.sources": [{"name": "any", "path": "any"}],
        "rollout.max_response_length": limit if kind == "serving" else limit - 2 * PROMPT,
        "rollout.max_num_seqs": 1024,
        "rollout.gpu_memory_utilization": 0.9,
        "loss.kl_coef": 0.01 if kind == "step" else 0,
        "packing.max_tokens_per_row": limit,
        "parallel.overlap_grad_reduce": True,
        "cluster.processes_per_node": min(gpus, GPUS_PER_NODE),
        "cluster.nodes": -(-gpus // GPUS_PER_NODE),
    } | row["settings"]
    if "servers" in row:
        urls = [f"http://server{number}:80" for number in range(row["servers"])]
        keys |= {"rollout.engine": "server", "rollout.servers": urls, "rollout.staleness": 1}
    raw: dict[str, Any] = {}
    for key, value in keys.items():
        section, _, name = key.rpartition(".")
        (raw.setdefault(section, {}) if section else raw)[name] = value
    return Recipe.model_validate(raw)
