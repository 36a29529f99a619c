"""The runs of a sweep: each is a recipe with overrides, and what it may spend.

    eqlen train RECIPE OVERRIDES

of a cell is that run, started by whatever; its folder is ``SWEEP'S FOLDER/RECIPE/METHOD-seedN``.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from megatron_eqlen.metrics import spent
from megatron_eqlen.objectives.recipes import load
from megatron_eqlen.recipe import Recipe, RecipeError
from megatron_eqlen.recipe.budget import UNITS, Spent
from megatron_eqlen.recipe.yaml_values import read_value
from megatron_eqlen.report.metrics import read_metrics
from megatron_eqlen.report.run_folder import RunFolder
from megatron_eqlen.sweep.schema import SweepRecipe


@dataclass(frozen=True)
class Cell:
    """One run, without what it may spend."""

    recipe_file: str
    method: str
    seed: int
    folder: Path
    overrides: tuple[str, ...]

    @property
    def model(self) -> str:
        """The recipe file's name, which stands for its model."""
        return Path(self.recipe_file).stem

    @property
    def group(self) -> str:
        """The same of all seeds."""
        return f"{self.model}/{self.method}"

    @property
    def name(self) -> str:
        return f"{self.group}-seed{self.seed}"

    def recipe(self, limits: Sequence[str]) -> Recipe:
        """Its recipe, with ``Plan.limits``. Raises RecipeError."""
        try:
            return load(self.recipe_file, [*self.overrides, *limits])
        except RecipeError as error:
            raise RecipeError(f"{self.name}: {error}") from None

    def ended(self, limits: Sequence[str]) -> bool:
        """Whether nothing of the run is left to do."""
        recipe = self.recipe(limits)
        return RunFolder(recipe).ended(recipe)

    def spent(self) -> Spent:
        """What the run has spent so far."""
        records = read_metrics(self.folder)
        return spent(records[-1]["step"], records[-1]) if records else Spent()


class Plan:
    """All cells of a sweep, and what they may spend."""

    def __init__(self, sweep: SweepRecipe, overrides: Sequence[str] = ()) -> None:
        """``overrides`` are of all runs, over those of the sweep."""
        self.sweep = sweep
        self.cells = [
            Cell(
                recipe,
                method,
                seed,
                folder := sweep.path / Path(recipe).stem / f"{method}-seed{seed}",
                (
                    *map(_override, sweep.set.items()),
                    *map(_override, sweep.methods[method].set.items()),
                    *overrides,
                    f"seed={seed}",
                    f"run_dir={folder}",
                ),
            )
            for recipe in sweep.recipes
            for method in sorted(sweep.methods, key=lambda name: name != sweep.reference)
            for seed in sweep.seeds
        ]
        """By recipe, the reference first."""
        self.amounts: dict[str, float] = {}
        """What the reference's runs of a recipe have spent, once all have ended."""

    @property
    def firsts(self) -> list[Cell]:
        """One run of each recipe and method; the others differ from it in their seed alone."""
        return self.cells[:: len(self.sweep.seeds)]

    def cell(self, name: str) -> Cell:
        """Raises ValueError for a name that no cell has."""
        for cell in self.cells:
            if cell.name == name:
                return cell
        raise ValueError(f"expected a run of the sweep, RECIPE/METHOD-seedN, found {name!r}")

    def is_reference(self, cell: Cell) -> bool:
        return cell.method == self.sweep.reference

    def is_matched(self, cell: Cell) -> bool:
        """Whether what it may spend comes from the reference's runs."""
        return self.sweep.reference is not None and not self.is_reference(cell)

    def references(self, cell: Cell) -> list[Cell]:
        """The runs that say what ``cell`` may spend."""
        if not self.is_matched(cell):
            return []
        return [other for other in self.cells if other.model == cell.model and self.is_reference(other)]

    def limits(self, cell: Cell) -> list[str] | None:
        """The overrides that end its run; None while a run of the reference that says so has not ended."""
        if not self.is_matched(cell):
            return []
        if cell.model not in self.amounts:
            references = self.references(cell)
            if not all(reference.ended([]) for reference in references):
                return None
            self.amounts[cell.model] = fmean(
                getattr(reference.spent(), self.sweep.match) for reference in references
            )
        return self.matched(self.amounts[cell.model])

    def matched(self, amount: float) -> list[str]:
        """The overrides that end a run when it has spent ``amount`` of what is matched, and no others."""
        limits = dict.fromkeys(UNITS, None) | {"steps": self.sweep.max_steps, self.sweep.match: amount}
        return [*map(_override, limits.items())]

    def some_recipe(self, cell: Cell) -> Recipe:
        """The cell's recipe, whatever it may spend. Raises RecipeError."""
        return cell.recipe(self.matched(1.0) if self.is_matched(cell) else [])


def _override(item: tuple[str, Any]) -> str:
    """``key=value`` as the command line has it."""
    key, value = item
    plain = isinstance(value, str) and read_value(value) == value
    return f"{key}={value if plain else json.dumps(value)}"
