"""The runs of a sweep: each is a recipe with overrides, and a budget. ``eqlen train RECIPE OVERRIDES`` with a
cell's arguments is that run, however it is started, in ``SWEEP'S FOLDER/RECIPE/METHOD-seedN``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import Any

from megatron_eqlen.experiments.figures import ACCURACY, MEASURES
from megatron_eqlen.experiments.schema import OF_RUNS, OF_RUNS_ONLY, SweepRecipe, require_known
from megatron_eqlen.job import load
from megatron_eqlen.metrics import spent
from megatron_eqlen.recipe import Recipe, RecipeError
from megatron_eqlen.recipe.budget import UNITS, Spent
from megatron_eqlen.recipe.yaml_values import to_yaml
from megatron_eqlen.report.metrics import read_newest
from megatron_eqlen.report.status import is_complete, is_trained
from megatron_eqlen.run.run_folder import RunFolder


@dataclass(frozen=True)
class Cell:
    """One run, without its budget."""

    recipe_file: str
    method: str
    seed: int
    folder: Path
    overrides: tuple[str, ...]

    @property
    def model(self) -> str:
        """Name of the recipe file, which stands for its model."""
        return Path(self.recipe_file).stem

    @property
    def group(self) -> str:
        """Name that all seeds of a recipe and method share."""
        return f"{self.model}/{self.method}"

    @property
    def name(self) -> str:
        return f"{self.group}-seed{self.seed}"

    def recipe(self, limits: Sequence[str]) -> Recipe:
        """Return the cell's recipe with ``limits`` (see ``Plan.limits``). Raises RecipeError."""
        try:
            return load(self.recipe_file, [*self.overrides, *limits])
        except RecipeError as error:
            raise RecipeError(f"{self.name}: {error}") from None

    def ended(self, limits: Sequence[str]) -> bool:
        """Return True if nothing of the run is left to do."""
        return is_complete(self.folder, self.recipe(limits))

    def trained(self, limits: Sequence[str]) -> bool:
        """Return True if the run has results, perhaps not yet those that ``evaluation`` asks for by now."""
        return is_trained(self.folder, self.recipe(limits))

    def spent(self) -> Spent:
        """Return the run's spending so far."""
        newest = read_newest(self.folder, 1)
        return spent(newest[-1]["step"], newest[-1]) if newest else Spent()


class Plan:
    """All cells of a sweep, and their budgets."""

    def __init__(self, sweep: SweepRecipe, overrides: Sequence[str] = ()) -> None:
        """Make the cells. ``overrides`` come after the sweep's. Raises RecipeError for ``OF_RUNS``."""
        if own := [override for override in overrides if override.partition("=")[0] in OF_RUNS]:
            raise RecipeError(f"{own[0]}: {OF_RUNS_ONLY}")
        self.sweep = sweep
        self.cells = [
            Cell(
                recipe,
                method,
                seed,
                folder := sweep.path / Path(recipe).stem / f"{method}-seed{seed}",
                # Later overrides win: the sweep's, the method's, the command's, the run's own.
                (
                    *map(_override, sweep.set.items()),
                    *map(_override, sweep.methods[method].set.items()),
                    *overrides,
                    f"seed={seed}",
                    f"run_dir={folder}",
                ),
            )
            for recipe in sweep.recipes
            # False sorts before True: the reference comes first, then the others as they stand.
            for method in sorted(sweep.methods, key=lambda name: name != sweep.reference)
            for seed in sweep.seeds_of(Path(recipe).stem, method)
        ]
        """Ordered by recipe, the reference first."""
        self.amounts: dict[str, float] = {}
        """Spending of the reference's runs of each recipe, once all have ended."""

    def recipes(self) -> list[Recipe]:
        """Return a recipe of each file and method; all others differ from it in their seed and budget alone.
        Raises RecipeError, also for two methods that make the same runs, and for a folder of another run."""
        # What differs from run to run in any case, and budgets where the sweep gives them.
        own = {"run_dir": None, "variant": {}, **(dict.fromkeys(UNITS) if self.sweep.reference else {})}
        seen, recipes = dict[tuple[str, str], str](), []
        for group, (cell, *others) in groupby(self.cells, key=lambda cell: cell.group):
            # whatever its budget
            recipes.append(cell.recipe(self.matched(1.0) if self.references(cell) else []))
            for each in (cell, *others):
                its = recipes[-1].model_copy(update={"seed": each.seed, "run_dir": str(each.folder)})
                RunFolder(its).check(its, writes=False)
            made = cell.recipe_file, recipes[-1].model_copy(update=own).model_dump_json()
            if (other := seen.setdefault(made, group)) != group:
                raise RecipeError(f"{other} and {group}: expected methods that differ, found the same recipe")
        known = {benchmark.name for recipe in recipes for benchmark in recipe.evaluation.benchmarks}
        require_known("charts", self.sweep.charts, sorted({*MEASURES, *map(ACCURACY.format, known)}))
        for number, table in enumerate(self.sweep.tables):
            require_known(f"tables.{number}.benchmarks", table.benchmarks, sorted(known))
        return recipes

    def references(self, cell: Cell) -> list[Cell]:
        """Return the runs of the reference that determine the cell's budget; none if its recipe does."""
        if cell.method == self.sweep.reference:
            return []
        return [c for c in self.cells if (c.model, c.method) == (cell.model, self.sweep.reference)]

    def limits(self, cell: Cell) -> list[str] | None:
        """Return the overrides that end the cell's run; None until the runs that say so have ended."""
        if not (references := self.references(cell)):
            return []
        if cell.model not in self.amounts:
            if not all(reference.trained([]) for reference in references):
                return None
            # Kept, since runs that have ended spend nothing more.
            self.amounts[cell.model] = fmean(getattr(each.spent(), self.sweep.match) for each in references)
        return self.matched(self.amounts[cell.model])

    def matched(self, amount: float) -> list[str]:
        """Return the overrides that end a run when it has spent ``amount`` of the matched quantity."""
        # Limits that the recipe has itself are taken away.
        limits = dict.fromkeys(UNITS, None) | {"steps": self.sweep.max_steps, self.sweep.match: amount}
        return [*map(_override, limits.items())]


def _override(item: tuple[str, Any]) -> str:
    """Return ``key=value`` as on the command line."""
    # YAML ends a plain value with a line ``...``; the width keeps a long value in one line.
    text = to_yaml(item[1], default_flow_style=True, width=1 << 30)
    return f"{item[0]}={text.removesuffix('...\n').rstrip('\n')}"
