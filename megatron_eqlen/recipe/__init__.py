"""Recipes: every key with its type and default, and the name of a run. ``recipe.load`` reads files and
``recipe.checks`` checks keys against each other. Nothing here imports what trains or generates."""

from megatron_eqlen.recipe.naming import MAY_CHANGE, differences, is_under, leaves
from megatron_eqlen.recipe.schema import (
    ANY_COLUMNS,
    SFT,
    AnswerSampling,
    BenchmarkRecipe,
    ClusterRecipe,
    DataRecipe,
    EnvironmentRecipe,
    LoraRecipe,
    LossRecipe,
    ModelRecipe,
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
    TeacherRecipe,
    When,
    shown,
)
