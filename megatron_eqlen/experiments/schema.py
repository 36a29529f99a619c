"""Schema of a sweep file, and its reader."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from megatron_eqlen.recipe import NonNegativeInt, PositiveInt, RecipeError, Section
from megatron_eqlen.recipe.budget import UNITS
from megatron_eqlen.recipe.load import explain, read_yaml

log = logging.getLogger(__name__)

BASE = "base"
"""Method name of the model before training: every run's first evaluation."""


class MethodRecipe(Section):
    label: str | None = None
    """Name in tables and figures; default: the method's name."""
    set: dict[str, Any] = Field({})
    """Recipe keys (``loss.kl_coef: 0``) that make the method."""


class TableRecipe(Section):
    title: str
    kind: Literal["accuracy", "difference", "efficiency"] = "accuracy"
    methods: list[str] | None = None
    """Rows, ``base`` among them if it is wanted; default: all. A ``difference`` is taken to the first."""
    recipes: list[str] | None = None
    """Recipes that the table covers; default: all."""
    benchmarks: list[str] | None = None
    """Benchmarks that the table covers; default: all."""


class SweepRecipe(Section):
    name: str
    """Name of the sweep; its runs are under ``runs/NAME``."""
    recipes: list[str] = Field(min_length=1)
    """Recipe files, relative to this one. Each names a column of the tables: its model."""
    methods: dict[str, MethodRecipe] = Field(min_length=1)
    """Methods by name, which is part of their runs' folders."""
    seeds: list[NonNegativeInt] = Field([0], min_length=1)
    fewer_seeds: dict[str, PositiveInt] = Field({})
    """Number of seeds, the first of ``seeds``, by recipe or method; default: all."""
    set: dict[str, Any] = Field({})
    """Recipe keys of all runs."""
    reference: str | None = None
    """The method that ends as its recipe says. All others may spend as much as its runs did, on average over
    its seeds. Default: each run ends as its recipe says."""
    match: Literal["gpu_hours", "generated_tokens", "flops"] = "gpu_hours"
    """Quantity to match; the paper matches GPU hours, on a loaded machine ``flops`` is fairer."""
    max_steps: PositiveInt | None = None
    """Most steps of the other methods, whatever remains of their budget; default: no such limit."""
    tables: list[TableRecipe] = Field([])
    """Default: a table of all accuracies, and one of efficiency."""
    figures: list[str] | None = None
    """Methods that figures show: more than ten are hard to tell apart. Default: all."""
    charts: list[str] | None = None
    """Titles of the charts that figures show, for example ``Reward``. Default: all."""
    folder: str | None = None
    """Folder of the sweep; default: ``runs/NAME``."""

    @property
    def path(self) -> Path:
        return Path(self.folder).expanduser() if self.folder else Path("runs") / self.name

    def label(self, method: str) -> str:
        return method if method == BASE else self.methods[method].label or method

    def seeds_of(self, model: str, method: str) -> list[int]:
        """Return the seeds of a method on the recipe file of that name."""
        numbers = [self.fewer_seeds[name] for name in (model, method) if name in self.fewer_seeds]
        return self.seeds[: min(numbers, default=None)]


def load_sweep(path: Path) -> SweepRecipe:
    """Return the checked sweep in ``path``, its recipes' paths resolved. Raises RecipeError."""
    raw = read_yaml(path)
    if "model" in raw:
        raise RecipeError(f"{path}: expected a sweep (recipes, methods), found a recipe: eqlen train {path}")
    try:
        sweep = SweepRecipe.model_validate(raw)
        _check(sweep)
    except ValueError as error:
        raise RecipeError(f"{path}: {explain(error, SweepRecipe)}") from None
    files = [str(path.parent / Path(recipe).expanduser()) for recipe in sweep.recipes]
    return sweep.model_copy(update={"recipes": files})


def require_known(key: str, names: Iterable[str] | None, known: Sequence[str]) -> None:
    """Raise RecipeError for a name that is not ``known``."""
    if unknown := [name for name in names or () if name not in known]:
        between = "; " if any("," in name for name in known) else ", "
        raise RecipeError(f"{key}: expected some of {between.join(known) or 'none'}, found {unknown[0]!r}")


OF_RUNS = {"seed", "run_dir"}
OF_RUNS_ONLY = "has no effect: each run of a sweep has its own (seeds)"


def _check(sweep: SweepRecipe) -> None:
    for name in (sweep.name, *sweep.methods):
        if not re.fullmatch(r"[\w.,=+@-]{1,100}", name) or name == BASE:
            expected = f"expected 1 to 100 letters, digits or any of '_-.,=+@', and not {BASE!r}"
            raise ValueError(f"{expected}, as the name of a sweep or method (a folder), found {name!r}")
    if sweep.reference is not None and sweep.reference not in sweep.methods:
        raise ValueError(f"reference: expected one of {', '.join(sweep.methods)}, found {sweep.reference!r}")
    if sweep.reference is None and (alone := sweep.model_fields_set & {"match", "max_steps"}):
        raise ValueError(f"{min(alone)}: no effect without reference, the method that the others match")
    if more := [name for name, number in sweep.fewer_seeds.items() if number >= len(sweep.seeds)]:
        raise ValueError(f"fewer_seeds.{more[0]}: expected fewer than the {len(sweep.seeds)} seeds")
    # Stems, since they name columns and folders: two paths may have the same one.
    stems, labels = [Path(recipe).stem for recipe in sweep.recipes], [*map(sweep.label, sweep.methods)]
    for what, values in (("seeds", sweep.seeds), ("recipes", stems), ("methods.*.label", [BASE, *labels])):
        if len({*values}) < len(values):
            raise ValueError(f"{what}: expected each once, found {values}")
    # Keys that each run has of its own.
    sets = {"set": sweep.set} | {f"methods.{name}.set": method.set for name, method in sweep.methods.items()}
    for key, values in sets.items():
        if own := OF_RUNS & values.keys():
            raise ValueError(f"{key}.{min(own)}: {OF_RUNS_ONLY}")
    # Budgets: without a reference they should be equal, with one they come from it.
    ends = {name: {key: method.set.get(key) for key in UNITS} for name, method in sweep.methods.items()}
    for name, other in pairwise(ends):
        if sweep.reference is None and ends[name] != ends[other]:
            log.warning("methods.%s and methods.%s are not equally long (see reference)", name, other)
    for name in ends.keys() - {sweep.reference} if sweep.reference else ():
        if own := UNITS.keys() & sweep.methods[name].set.keys():
            raise ValueError(f"methods.{name}.set.{min(own)}: no effect beside reference: {sweep.reference}")
    # Names in tables and figures must be known: (key, names, known ones).
    chosen = [
        ("figures", sweep.figures, {*sweep.methods}),
        ("fewer_seeds", sweep.fewer_seeds, {*stems, *sweep.methods}),
    ]
    for number, table in enumerate(sweep.tables):
        chosen.append((f"tables.{number}.methods", table.methods, {BASE, *sweep.methods}))
        chosen.append((f"tables.{number}.recipes", table.recipes, {*stems}))
    for key, names, known in chosen:
        require_known(key, names, sorted(known))
    for number, table in enumerate(sweep.tables):
        if table.kind == "difference" and len({*(table.methods or (BASE, *labels))}) < 2:
            raise ValueError(f"tables.{number}.methods: expected two or more, found {table.methods}")
