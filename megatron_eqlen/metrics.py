"""Numbers that a run logs: ``metrics.yaml`` declares each name, its unit, and how several values are merged.

    at_once([replica_0, replica_1]) -> one harvest        in_turn([batch_0, batch_1]) -> one step

*At once*: measured at the same time by rows, data-parallel ranks or engine replicas. *In turn*: one after the
other within a step, as by the batches of a harvest and the optimizer steps of an update. Token counts add up
in both; seconds add up in turn, while at once the slowest counts. An undeclared name is an error.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from megatron_eqlen.recipe.budget import Spent
from megatron_eqlen.recipe.yaml_values import read_value
from megatron_eqlen.types import Metrics


class MetricError(ValueError):
    """Metric that is not declared."""


class Metric(NamedTuple):
    """Declaration of a name, or of all names with any text in place of its ``*``."""

    name: str
    unit: str
    merge: str
    """Merging at once."""
    about: str
    in_turn: str


STAGES = ("harvest", "score", "wait", "trees", "unpark", "train", "park", "sync", "evaluate", "checkpoint")
"""Stages of a step, each measured as ``time/NAME``."""
MEMORY = ("memory/peak/", "memory/reserved/", "memory/device/", "memory/planned/")
"""Prefixes of per-stage memory metrics; the stage name is appended."""
MEAN = "mean of "

_TABLE = read_value(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
DECLARED = [
    Metric(name, unit, merge, about, *in_turn or (merge,))
    for name, (unit, merge, about, *in_turn) in _TABLE.items()
]
EXACT = {declared.name: declared for declared in DECLARED if "*" not in declared.name}
FAMILIES = {tuple(declared.name.split("*")): declared for declared in DECLARED if "*" in declared.name}


def metric(name: str) -> Metric:
    """Return the declaration of ``name``. Raises MetricError for a name that is not declared."""
    if name in EXACT:
        return EXACT[name]
    for (begin, end), family in FAMILIES.items():
        if name.startswith(begin) and name.endswith(end) and len(name) > len(begin + end):
            variable = name[len(begin) : len(name) - len(end)]
            return Metric(*(field.replace("*", variable) for field in family))
    near = difflib.get_close_matches(name, EXACT, n=1, cutoff=0.0)[0]
    raise MetricError(f"metric {name!r} is not declared in metrics.yaml (nearest: {near!r})")


def counts(way: str) -> list[str]:
    """Return the metrics that weigh a mean; none of other ways to merge."""
    return way.removeprefix(MEAN).split(" + ") if way.startswith(MEAN) else []


def check(metrics: Metrics) -> Metrics:
    """Return ``metrics`` if all of them are declared. Raises MetricError."""
    for name in metrics:
        metric(name)
    return metrics


def at_once(parts: Sequence[Metrics]) -> Metrics:
    """Merge the metrics of rows, ranks or replicas that worked at the same time."""
    return {name: _merged(name, metric(name).merge, parts) for name in _names(parts)}


def in_turn(parts: Sequence[Metrics]) -> Metrics:
    """Merge the metrics of batches or updates that came one after the other."""
    return {name: _merged(name, metric(name).in_turn, parts) for name in _names(parts)}


def over_ranks(ranks: Sequence[Metrics]) -> Metrics:
    """Merge each rank's metrics of a step: peak memory by stage and, with several ranks, the slowest rank."""
    of_memory = [{name: own[name] for name in own if name.startswith(MEMORY)} for own in ranks]
    merged = at_once(of_memory)
    for stage in STAGES if len(ranks) > 1 else ():
        seconds = {rank: own[f"time/{stage}"] for rank, own in enumerate(ranks) if f"time/{stage}" in own}
        if seconds:
            slowest = max(seconds, key=seconds.__getitem__)
            merged[f"time/slowest/{stage}"] = seconds[slowest]
            merged[f"time/slowest_rank/{stage}"] = float(slowest)
    return merged


def _names(parts: Sequence[Metrics]) -> Iterable[str]:
    return dict.fromkeys(name for part in parts for name in part)


def _merged(name: str, way: str, parts: Sequence[Metrics]) -> float:
    values = [part[name] for part in parts if name in part]
    if counted := counts(way):
        weights = [sum(part.get(count, 0.0) for count in counted) for part in parts]
        if not sum(weights):  # nothing was counted in any part
            return fmean(values)
        return sum(w * part.get(name, 0.0) for w, part in zip(weights, parts, strict=True)) / sum(weights)
    if any(math.isnan(value) for value in values):  # max and min may drop a NaN
        return math.nan
    return {"sum": sum, "max": max, "min": min, "last": lambda them: them[-1]}[way](values)


COST_METRICS = {
    "gpu_hours": "time/gpu_hours",
    "generated_tokens": "total/generated_tokens",
    "flops": "total/flops",
}
"""Metrics that hold a run's costs so far, by the recipe's key that limits them."""


def spent(steps: int, metrics: Mapping[str, float | None]) -> Spent:
    """Return the costs of a run up to step ``steps``, from its metrics; missing metrics count as 0."""
    return Spent(steps, **{cost: metrics.get(name) or 0.0 for cost, name in COST_METRICS.items()})
