"""The schema of a recipe: every key, its type, its default, and the name that a run gets from it.

``recipe_load`` reads files, ``recipe_checks`` says what must fit together; nothing of the rest of the code is
known here.
"""

from megatron_eqlen.recipe.naming import MAY_CHANGE, differences, is_under, leaves
from megatron_eqlen.recipe.schema import (
    AggregationName,
    BenchmarkRecipe,
    DataRecipe,
    EqualLengthRecipe,
    LossRecipe,
    MismatchRecipe,
    NonNegativeInt,
    OptimizerRecipe,
    ParallelRecipe,
    PositiveInt,
    ProfileRecipe,
    Recipe,
    RecipeError,
    RewardRecipe,
    RolloutRecipe,
    Section,
    SourceRecipe,
)

__all__ = [
    "MAY_CHANGE",
    "AggregationName",
    "BenchmarkRecipe",
    "DataRecipe",
    "EqualLengthRecipe",
    "LossRecipe",
    "MismatchRecipe",
    "NonNegativeInt",
    "OptimizerRecipe",
    "ParallelRecipe",
    "PositiveInt",
    "ProfileRecipe",
    "Recipe",
    "RecipeError",
    "RewardRecipe",
    "RolloutRecipe",
    "Section",
    "SourceRecipe",
    "differences",
    "is_under",
    "leaves",
]
