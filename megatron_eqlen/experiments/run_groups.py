"""Run folders -> groups of runs that have one recipe and differ in their seed. If recipes of one method
differ, each counts as a method of its own, named by the difference."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from megatron_eqlen import metrics as m
from megatron_eqlen.evaluation.result import EvaluationResult, by_benchmark
from megatron_eqlen.experiments.schema import BASE
from megatron_eqlen.job import Job
from megatron_eqlen.objectives.registry import with_defaults
from megatron_eqlen.recipe import Recipe, is_under, leaves, shown
from megatron_eqlen.recipe.budget import Spent
from megatron_eqlen.recipe.load import RECIPE, load_run
from megatron_eqlen.report.format import RESPONSE_LENGTH, REWARD
from megatron_eqlen.report.metrics import Columns

AFTER = Path("evaluation/after.json")
NOT_THE_METHOD = (
    "seed", "name", "run_dir", "variant", "model.path", "cluster", "checkpoint", "evaluation", "report",
    "profile", "rollout.servers", "inputs_from",
)  # fmt: skip
"""Keys in which runs of one method may differ: where they ran and what they recorded. Models are columns."""


@dataclass(frozen=True)
class RunResult:
    """The results of a finished run, from its folder."""

    folder: Path
    recipe: Recipe
    before: dict[str, EvaluationResult]
    after: dict[str, EvaluationResult]
    """Results by benchmark."""
    effective_samples: float
    generated_tokens: float
    spent: Spent
    reward: float
    length: float
    """Means over the last tenth of the steps; NaN where they were not measured."""


@dataclass(frozen=True)
class Group:
    """The runs of one method on one model; they differ in their seed."""

    model: str
    method: str
    runs: list[RunResult]

    def by_seed(self, benchmark: str) -> dict[int, EvaluationResult]:
        """Return the results by seed; of the base, which runs of one seed have measured alike, once each."""
        every = [(run.recipe.seed, run.before if self.method == BASE else run.after) for run in self.runs]
        return {seed: results[benchmark] for seed, results in every if benchmark in results}


def run_folders(folders: Sequence[Path]) -> list[Path]:
    """Return the run folders among and below ``folders``. Raises ValueError for one that has none."""
    found = {folder: [*_runs_in(folder)] for folder in folders}
    if without := [str(folder) for folder, runs in found.items() if not runs]:
        raise ValueError(f"{', '.join(without)}: expected a run folder, or a folder of some, found none")
    return list(dict.fromkeys(run for runs in found.values() for run in runs))


def _runs_in(folder: Path) -> Iterator[Path]:
    """Yield the runs in a folder, without searching them: they may hold a hundred thousand files."""
    if os.path.lexists(folder / RECIPE):
        yield folder
    elif folder.is_dir():
        for inner in sorted(folder.iterdir()):
            # A link may lead to a run that is found anyway, or in a circle.
            if not inner.is_symlink():
                yield from _runs_in(inner)


def read_run(folder: Path, recipe: Recipe | None = None) -> RunResult:
    """Return the results of a run that has ended. ``recipe``: the run's; default: read from its folder."""
    before = folder / "evaluation" / "before.json"
    names = ("objective/effective_samples", "harvest/generated_tokens", *REWARD, *RESPONSE_LENGTH)
    columns = Columns(folder, names)
    if not len(columns.steps):
        raise ValueError(f"{folder}: expected a run with metrics of a step or more, found none")
    # The last tenth of the steps, at least one.
    newest = slice(-max(1, len(columns.steps) // 10), None)
    ends = [columns.first_of(names)[newest] for names in (REWARD, RESPONSE_LENGTH)]
    return RunResult(
        folder,
        recipe or load_run(folder),
        by_benchmark(before) if os.path.lexists(before) else {},
        by_benchmark(folder / AFTER) if os.path.lexists(folder / AFTER) else {},
        # A step that lacks the metric adds nothing to a sum.
        float(np.nansum(columns["objective/effective_samples"])),
        float(np.nansum(columns["harvest/generated_tokens"])),
        m.spent(columns.last.get("step", 0), columns.last),
        *(float(end[~np.isnan(end)].mean()) if not np.isnan(end).all() else math.nan for end in ends),
    )


def group_runs(runs: Sequence[RunResult]) -> list[Group]:
    """Group runs by model and method: each model's base, then independent sampling, then equal lengths."""
    groups, models = [], _labels([run.recipe.model.path for run in runs])
    for model in dict.fromkeys(models):
        mine = [run for run, own in zip(runs, models, strict=True) if own == model]
        mine.sort(key=lambda run: (run.recipe.sampling == "equal_length", run.recipe.method))
        if measured := [run for run in mine if run.before]:
            groups.append(Group(model, BASE, measured))
        # Sorted by seed, so that two runs of one seed are neighbours below.
        for method in dict.fromkeys(run.recipe.method for run in mine):
            same = [run for run in mine if run.recipe.method == method]
            same.sort(key=lambda run: run.recipe.seed)
            groups += [Group(model, name, runs) for name, runs in _by_recipe(method, same).items()]
    # The base group holds runs of all methods, whose seeds repeat.
    for group in (group for group in groups if group.method != BASE):
        for run, other in pairwise(group.runs):
            if (seed := run.recipe.seed) == other.recipe.seed:
                expected = f"expected runs of {run.recipe.method} to differ in their seed, found {seed} twice"
                raise ValueError(f"{run.folder} and {other.folder}: {expected}")
    return groups


def _labels(paths: Sequence[str]) -> list[str]:
    """Return a model's name for each path: as many of its last parts as tell it from the others."""
    real = {path: os.path.realpath(path) for path in paths}
    names = {place: [part for part in Path(path).parts if part != "/"] for path, place in real.items()}
    labels = dict[str, str]()
    for count in range(1, 1 + max(map(len, names.values()))):
        if len({*labels.values()}) < len(names):
            labels = {place: "-".join(parts[-count:]) for place, parts in names.items()}
    return [labels[real[path]] for path in paths]


def _by_recipe(method: str, runs: Sequence[RunResult]) -> dict[str, list[RunResult]]:
    """Return runs by recipe: the method, and the keys in which recipes of this method differ."""
    # Defaults filled in: a key that is left out equals its default written down.
    settings = [leaves(with_defaults(Job(run.recipe)).model_dump(mode="json")) for run in runs]
    values = [{key: v for key, v in of.items() if not is_under(key, NOT_THE_METHOD)} for of in settings]
    every = dict.fromkeys(key for entries in values for key in entries)
    # Keys in which these runs differ name the groups, such as ``grpo (loss.kl_coef=0.001)``.
    keys = [key for key in every if any(entries.get(key) != values[0].get(key) for entries in values)]
    named: dict[str, list[RunResult]] = {}
    for run, entries in zip(runs, values, strict=True):
        apart = ", ".join(f"{key}={shown(entries.get(key))}" for key in keys)
        named.setdefault(f"{method} ({apart})" if apart else method, []).append(run)
    return named
