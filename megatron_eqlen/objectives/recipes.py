"""Recipes that are about to run: loaded with every check, those of the objective included, and remarks on
keys of a valid recipe that have no effect."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megatron_eqlen.objectives.checks import check_combination
from megatron_eqlen.objectives.registry import is_on_policy, resolve
from megatron_eqlen.recipe import Recipe, Section
from megatron_eqlen.recipe import load as recipe_load


def load(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Load the recipe in ``path`` with ``key.sub=value`` overrides applied. Raises RecipeError."""
    return recipe_load.load(path, overrides, [check_combination])


def parse(raw: dict[str, Any], where: str) -> Recipe:
    """Make a recipe from plain data; ``where`` names it in errors. Raises RecipeError."""
    return recipe_load.parse(raw, where, [check_combination])


def remarks(recipe: Recipe) -> list[str]:
    """Return remarks on a valid recipe: keys that have no effect, corrections that do little."""
    sentences: list[str] = []
    for key, needed, met in _conditions(recipe):
        value, default = _value_and_default(recipe, key)
        if not met and (value != default or _is_switched_on(recipe, key)):
            sentences.append(f"{key}: {json.dumps(value)} has no effect: it needs {needed}")
    from_engine = recipe.loss.old_logprobs == "rollout" and resolve(recipe).has_ratio
    if recipe.rollout.trains_older and recipe.loss.rollout_is == "none" and not from_engine:
        sentences.append(
            "loss.rollout_rs alone leaves out what is too far off: tokens of older weights within its bounds "
            "train as if the policy had sampled them (loss.rollout_is or loss.old_logprobs: rollout corrects)"
        )
    budget = recipe.rollout.tokens_per_step
    if is_on_policy(recipe, resolve(recipe)) and budget and not recipe.rollout.carry_over:
        kind = "sampling: tree" if recipe.sampling == "tree" else "equal_length.pair_weight: on_policy"
        sentences.append(
            "rollout.tokens_per_step cuts the longest rollouts, whose open ends count as 0 or are left out: "
            f"{kind} is unbiased only with rollout.carry_over: true and a rollout.max_staleness that cuts "
            "none"
        )
    return sentences


def _conditions(recipe: Recipe) -> Iterator[tuple[str, str, bool]]:
    """Yield keys that depend on another key: the key, its condition, and whether the recipe meets it."""
    rollout, loss, objective = recipe.rollout, recipe.loss, resolve(recipe)
    served, importance = rollout.engine == "server", loss.rollout_is != "none"
    yield "loss.rollout_is_threshold", "loss.rollout_is: token or sequence", importance
    yield "loss.old_logprobs", "an objective with an importance ratio", objective.has_ratio
    yield "loss.kl_estimator", "loss.kl_coef above 0", loss.kl_coef > 0
    yield "loss.max_num_gen_batches", "loss.dynamic_sampling: true", objective.dynamic_sampling
    yield "loss.router_replay", "rollout.keep_routes: true", rollout.keep_routes
    yield "rollout.record_routes", "rollout.keep_routes: true", rollout.keep_routes
    yield "rollout.max_staleness", "rollout.carry_over: true", rollout.carry_over
    yield "rollout.on_sync", "rollout.staleness of at least 1", rollout.staleness > 0
    yield "rollout.servers", "rollout.engine: server", served
    yield "rollout.sync", "rollout.engine: server", served
    yield "optimizer.min_lr", "optimizer.lr_schedule: linear or cosine", _rate_falls(recipe)
    yield "evaluation.every", "evaluation.benchmarks", bool(recipe.evaluation.benchmarks)
    for name in type(recipe.equal_length).model_fields:
        yield f"equal_length.{name}", "sampling: equal_length", recipe.sampling == "equal_length"
    for name in type(recipe.tree_sampling).model_fields:
        yield f"tree_sampling.{name}", "sampling: tree", recipe.sampling == "tree"
    yield "tree_sampling.step_tokens", "tree_sampling.fork: tokens", recipe.tree_sampling.fork == "tokens"
    yield "tree_sampling.marker", "tree_sampling.fork: marker", recipe.tree_sampling.fork == "marker"


def _rate_falls(recipe: Recipe) -> bool:
    return recipe.optimizer.lr_schedule != "constant"


def _is_switched_on(recipe: Recipe, key: str) -> bool:
    """Return whether the recipe file switches ``key`` on, though it is on by default. A resolved recipe gives
    every key of a section, on purpose or not."""
    section, name = key.split(".")
    values: Section = getattr(recipe, section)
    given = values.model_fields_set
    return name in given and len(given) < len(type(values).model_fields) and getattr(values, name) is True


def _value_and_default(recipe: Recipe, key: str) -> tuple[Any, Any]:
    section, name = key.split(".")
    values: Section = getattr(recipe, section)
    return getattr(values, name), type(values).model_fields[name].default
