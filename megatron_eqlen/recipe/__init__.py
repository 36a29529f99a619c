"""Recipes: ``schema`` (what a file may say), ``checks`` (what fits together), ``load`` (files, overrides).

``load(path, overrides)`` returns a frozen, checked ``Recipe``. Every mistake is a ``RecipeError``.
"""

from megatron_eqlen.recipe.checks import check_inputs
from megatron_eqlen.recipe.load import dump, load, parse, plain_differences
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
    "dump",
    "load",
    "parse",
    "plain_differences",
]
