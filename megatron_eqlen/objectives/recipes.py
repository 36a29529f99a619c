"""Recipes that are about to run: loaded with every check, those of the objective included, and remarks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_eqlen.objectives.checks import check_combination
from megatron_eqlen.objectives.objective import Objective
from megatron_eqlen.objectives.registry import is_on_policy
from megatron_eqlen.recipe import BenchmarkRecipe, Recipe
from megatron_eqlen.recipe import load as recipe_load


def load(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Load the recipe in ``path`` with ``key.sub=value`` overrides applied. Raises RecipeError."""
    return recipe_load.load(path, overrides, [check_combination])


def parse(raw: dict[str, Any], where: str) -> Recipe:
    """Make a recipe from plain data; ``where`` names it in errors. Raises RecipeError."""
    return recipe_load.parse(raw, where, [check_combination])


def answering(recipe: Recipe, name: str) -> tuple[Recipe, BenchmarkRecipe]:
    """Return the recipe that samples as the evaluation of benchmark ``name``, without what only training
    reads, and that benchmark. Raises ValueError."""
    benchmarks = {benchmark.name: benchmark for benchmark in recipe.evaluation.benchmarks}
    if name not in benchmarks:
        raise ValueError(f"--benchmark: expected one of {', '.join(benchmarks) or 'none'}, found {name!r}")
    raw = recipe.of_benchmark(benchmarks[name]).model_dump(mode="json", exclude_unset=True)
    for section in ("objective", "loss", "teacher", "equal_length", "tree_sampling", "optimizer"):
        raw.pop(section, None)
    return parse(raw, f"--benchmark {name}"), benchmarks[name]


def remarks(recipe: Recipe, objective: Objective) -> list[str]:
    """Return remarks on a valid recipe: corrections that do little."""
    sentences: list[str] = []
    updates = (recipe.steps or math.inf) * recipe.loss.minibatches * recipe.loss.epochs
    if recipe.optimizer.warmup_steps > updates:
        sentences.append(
            f"optimizer.warmup_steps: {recipe.optimizer.warmup_steps} is more than the run's {updates} "
            f"updates: the learning rate does not reach optimizer.lr"
        )
    uncorrected = recipe.loss.rollout_is == "none" and recipe.loss.old_logprobs == "recompute"
    if recipe.rollout.trains_older and uncorrected:
        sentences.append(
            "loss.rollout_rs alone leaves out what is too far off: tokens of older weights within its bounds "
            "train as if the policy had sampled them (loss.rollout_is or loss.old_logprobs: rollout corrects)"
        )
    budget = recipe.rollout.tokens_per_step
    on_policy = recipe.sampling == "independent" or is_on_policy(recipe, objective)
    if on_policy and budget and not recipe.rollout.carry_over:
        pairs = recipe.sampling == "equal_length"
        kind = "equal_length.pair_weight: on_policy" if pairs else f"sampling: {recipe.sampling}"
        sentences.append(
            "rollout.tokens_per_step cuts the longest rollouts, whose ends count as 0 or are left out: "
            f"{kind} is unbiased only with rollout.carry_over: true and rollout.max_staleness that cuts none"
        )
    if not recipe.supervised and not recipe.rollout.comparable:
        sentences.append(
            "rollout.mismatch compares nothing: the engine's log-probs are of the sampled distribution, the "
            "trainer's only with rollout.keep_sampling_mask: true, or with top_k, top_p and min_p off"
        )
    return sentences
