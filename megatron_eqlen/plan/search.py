"""Layouts for given machines (``eqlen plan RECIPE --search``): those that the plan says fit, the fastest
estimate first.

A candidate is a list of overrides of the recipe. The recipe's own checks, ``layout.check`` and ``memory``
decide whether it starts and fits; ``speed`` ranks.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from megatron_eqlen.hf.config import ModelConfig
from megatron_eqlen.objectives.recipes import load
from megatron_eqlen.plan.host import host_parts
from megatron_eqlen.plan.memory import Memory, memory
from megatron_eqlen.plan.model import model_config
from megatron_eqlen.plan.speed import GPUS, Gpu, Speed, interval, speed
from megatron_eqlen.plan.workload import Workload, workload
from megatron_eqlen.recipe import Recipe, RecipeError, layout
from megatron_eqlen.recipe.yaml_values import to_yaml

PER_NODE = 8
"""GPUs of a node; fewer GPUs are one node."""
TENSOR, CONTEXT, PIPELINE, ENGINE = (1, 2, 4, 8), (1, 2), (1, 2, 4, 8), (1, 2, 4, 8)
EXPERT = (1, 4, 8, 16)
STATES = (("none", "false"), ("full", "false"), ("none", "true"), ("full", "true"))
"""``parallel.recompute`` and ``optimizer.offload``, the cheapest first; the first that fits is proposed."""
SHOWN = 5


@dataclass(frozen=True)
class Machines:
    """GPUs for a run."""

    gpu: Gpu
    count: int

    @property
    def overrides(self) -> list[str]:
        here = min(self.count, PER_NODE)
        return [
            f"cluster.nodes={self.count // here}",
            f"cluster.processes_per_node={here}",
            f"cluster.gpu_memory_gib={self.gpu.memory_gib:g}",
        ]

    def __str__(self) -> str:
        return f"{self.count} x {self.gpu.name} ({self.gpu.memory_gib:g} GiB)"


@dataclass(frozen=True)
class Candidate:
    """Layout that can start."""

    overrides: list[str]
    recipe: Recipe
    need: Memory


@dataclass(frozen=True)
class Found:
    """Layouts that fit, the fastest estimate first, with their estimates."""

    machines: Machines
    model: ModelConfig
    work: Workload
    tried: int
    fit: list[tuple[Speed, Candidate]]


def machines(gpu: str | None, count: int | None, recipe: Recipe) -> Machines:
    """Return the machines of the options; default: the recipe's number of GPUs, H100. Raises ValueError."""
    names = {each.name.replace(" ", "").lower(): each for each in GPUS}
    chosen = names.get((gpu or "H100").replace(" ", "").lower())
    if chosen is None:
        raise ValueError(
            f"--gpu-type: expected one of {', '.join(each.name for each in GPUS)}, found {gpu!r}"
        )
    number = recipe.world_size if count is None else count
    if number > PER_NODE and number % PER_NODE:
        raise ValueError(f"--gpus: expected at most {PER_NODE}, or nodes of {PER_NODE}, found {number}")
    return Machines(chosen, number)


def search(path: Path, overrides: Sequence[str], where: Machines) -> Found:
    """Return the layouts of the recipe in ``path`` that fit. Raises ValueError, with the layout that lacks
    least, if none does."""
    original = load(path, overrides)
    if original.rollout.engine != "colocated" or original.cluster.device != "gpu":
        raise ValueError(
            f"--search: expected rollout.engine: colocated and cluster.device: gpu, found "
            f"{original.rollout.engine} and {original.cluster.device}"
        )
    plain = {"layers_per_stage": None, "virtual_pipeline": None, "expert_tensor": 1}
    changes = [
        f"parallel.{key}={'null' if value is None else value}"
        for key, value in plain.items()
        if getattr(original.parallel, key) != value
    ]
    model, work = model_config(original), workload(original)
    tried, fit, nearest = 0, [], None
    for keys in _layouts(original, model):
        for recompute, offload in STATES:
            state = [f"parallel.recompute={recompute}", f"optimizer.offload={offload}", *changes]
            candidate = _candidate(path, overrides, [*where.overrides, *keys, *state], model)
            if candidate is None:
                break
            tried += 1
            if nearest is None or candidate.need.shortfall < nearest.need.shortfall:
                nearest = candidate
            if not candidate.need.problems():
                fit.append((speed(candidate.recipe, model, work, where.gpu), candidate))
                break
    if not fit:
        raise ValueError(_none_fits(where, model, nearest))
    fit.sort(key=lambda pair: pair[0].seconds)
    return Found(where, model, work, tried, fit)


def _layouts(recipe: Recipe, model: ModelConfig) -> Iterator[list[str]]:
    """Yield the overrides of all layouts within the choices of this module; many cannot start."""
    path = recipe.data.max_prompt_length + recipe.rollout.max_response_length
    budget = recipe.packing.max_tokens_per_row
    rows = sorted({budget, max(path, budget // 2), 2 * budget})
    names = ("parallel.tensor", "parallel.context", "parallel.pipeline", "parallel.expert")
    experts = EXPERT if model.experts else (1,)
    for numbers in product(TENSOR, CONTEXT, PIPELINE, experts, ENGINE, rows):
        keys = (*names, "rollout.tensor_parallel", "packing.max_tokens_per_row")
        yield [f"{key}={number}" for key, number in zip(keys, numbers, strict=True)]


def _candidate(path: Path, overrides: Sequence[str], keys: list[str], model: ModelConfig) -> Candidate | None:
    """Return the layout; None if it cannot start: the recipe's checks or ``layout.check`` refuse it."""
    try:
        recipe = load(path, [*overrides, *keys])
        layout.check(recipe, model)
    except (RecipeError, layout.LayoutError):
        return None
    return Candidate(keys, recipe, memory(recipe, model))


def _none_fits(where: Machines, model: ModelConfig, nearest: Candidate | None) -> str:
    if nearest is None:
        return f"--search: no layout divides {model.model_type} over {where}"
    lacks, reasons = nearest.need.shortfall / 1e9, "; ".join(nearest.need.problems())
    return (
        f"--search: nothing fits {where}; the nearest layout lacks {lacks:.1f} GB a GPU ({reasons}): "
        f"{' '.join(nearest.overrides)}"
    )


def describe(found: Found, path: Path, overrides: Sequence[str]) -> str:
    """Return the fastest layouts as text, and the overrides of each."""
    counts = f"{len(found.fit)} of {found.tried} layouts that can start fit"
    head = f"search      {found.machines}: {counts}; the fastest estimates [intervals as in `eqlen plan`]:"
    shown = [_line(found, number) for number in range(min(SHOWN, len(found.fit)))]
    words = shlex.join([str(path), *overrides, *found.fit[0][1].overrides])
    return "\n".join([head, *shown, f"copy        eqlen plan {words}"])


def _line(found: Found, number: int) -> str:
    estimate, candidate = found.fit[number]
    recipe, need = candidate.recipe, candidate.need
    hours, (least, most) = estimate.seconds / 3600, interval(estimate.seconds / 3600)
    host = sum(host_parts(recipe, found.model, need.stages, found.work).values())
    return (
        f"{number + 1:<12}{hours:.2f} hours a step [{least:.2f} to {most:.2f}], "
        f"{estimate.tokens_per_second:,.0f} tokens/s (generation {estimate.generation / 3600:.2f}, training "
        f"{estimate.training / 3600:.2f});\n{' ' * 12}{recipe.world_size // recipe.rollout.tensor_parallel} "
        f"engines; {need.peak / 1e9:.0f} of {need.total / 1e9:.0f} GB a GPU, {host / 1e9:.0f} GB of a host\n"
        f"{' ' * 12}{' '.join(candidate.overrides)}"
    )


def write(found: Found, path: Path, overrides: Sequence[str], out: Path) -> None:
    """Write a recipe that extends the one in ``path`` by the overrides and the fastest layout."""
    recipe = found.fit[0][1].recipe.model_dump(mode="json")
    keys: dict[str, Any] = {
        "extends": os.path.relpath(path.resolve(), out.resolve().parent),
        "name": out.stem,
    }
    for override in (*overrides, *found.fit[0][1].overrides):
        *sections, name = override.partition("=")[0].split(".")
        into, value = keys, recipe
        for section in sections:
            into, value = into.setdefault(section, {}), value[section]
        into[name] = value[name]
    out.write_text(to_yaml(keys), encoding="utf-8")
