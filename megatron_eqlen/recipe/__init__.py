"""Recipes: ``schema`` (what a file may say), ``checks`` (what fits together), ``load`` (files, overrides).

``load(path, overrides)`` returns a frozen, checked ``Recipe``. Every mistake is a ``RecipeError``.
"""

from megatron_eqlen.recipe.checks import check_inputs
from megatron_eqlen.recipe.load import dump, load, parse
from megatron_eqlen.recipe.naming import MAY_CHANGE, differences, is_under
from megatron_eqlen.recipe.schema import (
    BenchmarkRecipe,
    DataRecipe,
    EqualLengthRecipe,
    LossRecipe,
    ParallelRecipe,
    Recipe,
    RecipeError,
    RewardRecipe,
    RolloutRecipe,
    SourceRecipe,
)

__all__ = [
    "MAY_CHANGE",
    "BenchmarkRecipe",
    "DataRecipe",
    "EqualLengthRecipe",
    "LossRecipe",
    "ParallelRecipe",
    "Recipe",
    "RecipeError",
    "RewardRecipe",
    "RolloutRecipe",
    "SourceRecipe",
    "check_inputs",
    "differences",
    "dump",
    "is_under",
    "load",
    "parse",
]
