"""Recipes that are going to run: loaded with every check, those of the objective included."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_eqlen import recipe_load
from megatron_eqlen.objectives.checks import check_combination
from megatron_eqlen.recipe import Recipe


def load(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Load the recipe in ``path`` with ``key.sub=value`` overrides applied. Raises RecipeError."""
    return recipe_load.load(path, overrides, [check_combination])


def parse(raw: dict[str, Any], where: str) -> Recipe:
    """Make a recipe from plain data; ``where`` names it in errors. Raises RecipeError."""
    return recipe_load.parse(raw, where, [check_combination])
