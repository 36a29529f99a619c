"""Token tree and comparison units of a scored rollout, checked against the recipe that trains it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from megatron_eqlen.objectives.objective import Objective
from megatron_eqlen.recipe import Recipe
from megatron_eqlen.sampling import KINDS
from megatron_eqlen.sampling.comparison import ComparisonUnit, Penalty, no_penalty
from megatron_eqlen.tokens import COLUMNS
from megatron_eqlen.types import FinishReason, Rollout, TokenTree


def comparison_units(
    rollout: Rollout, recipe: Recipe, objective: Objective
) -> tuple[TokenTree, list[ComparisonUnit]]:
    """Return the token tree of a rollout and the units over its nodes, not yet weighted, without columns that
    no loss reads. Raises ValueError for a rollout of another ``sampling`` than the recipe's."""
    _check(rollout, recipe)
    tree, units = _compare(rollout, recipe, objective, _length_penalty(recipe, objective))
    untrained = recipe.rollout.untrained_columns
    for node in tree.nodes:
        node.tokens = node.tokens.without(untrained)
    # the same units once more for each named reward, with its weight
    if objective.rewards == "apart":
        for name, weight in recipe.reward.weights.items():
            parts = [
                replace(part, grade=part.grade and replace(part.grade, reward=part.grade.rewards[name]))
                for part in rollout.parts
            ]
            _, named = _compare(replace(rollout, parts=parts), recipe, objective, no_penalty)
            for unit, of_name in zip(units, named, strict=True):
                unit.apart.append((weight, of_name))
    return tree, units


def _compare(
    rollout: Rollout, recipe: Recipe, objective: Objective, penalty: Penalty
) -> tuple[TokenTree, list[ComparisonUnit]]:
    """Return the tree and the units of a rollout. With ``forks: pooled`` they are its lines, and all that
    continues them: K thoughts, and their K x M answers."""
    tree, units = KINDS[recipe.sampling].compare(rollout, recipe, penalty)
    if objective.forks != "pooled" or len(units) < 3:
        return tree, units
    # units of a prompt's K thoughts, and of each thought's M answers: all K x M become one
    lines, first, *others = units
    for unit in others:
        first.members += unit.members
        first.nodes += unit.nodes
        first.rewards += unit.rewards
    first.share = sum(unit.share or 0.0 for unit in (first, *others))
    return tree, [lines, first]


def due_rollouts(rollouts: Sequence[Rollout]) -> list[Rollout]:
    """Return the complete rollouts, which the step trains: only their units and rewards are known."""
    return [rollout for rollout in rollouts if not rollout.suspended]


def _length_penalty(recipe: Recipe, objective: Objective) -> Penalty:
    """Return DAPO's soft penalty: 0 where the buffer starts, -factor at the limit and where truncated."""
    buffer, factor = objective.overlong_buffer, objective.overlong_factor
    start = recipe.rollout.max_response_length - buffer

    def penalty(length: int, finish_reason: FinishReason | None) -> float:
        return -factor if finish_reason == "length" else min((start - length) / buffer * factor, 0.0)

    return penalty if buffer else no_penalty


def _check(rollout: Rollout, recipe: Recipe) -> None:
    """Raise ValueError for a rollout of another sampling, for a grade without the rewards that the recipe
    weighs, and unless the rollout has exactly the loss's columns that the recipe switches on: with a sampling
    mask, for example, the loss normalises over its tokens instead of the vocabulary."""
    where = f"prompt {rollout.prompt_id}"
    if rollout.kind != recipe.sampling:
        raise ValueError(f"{where}: expected a rollout of sampling: {recipe.sampling}, found {rollout.kind}")
    weights = recipe.reward.weights.keys()
    for grade in (part.grade for part in rollout.parts if part.grade):
        if grade.rewards.keys() != weights:
            expected = f"expected rewards (reward.weights) {', '.join(weights) or 'without names'}"
            found = ", ".join(grade.rewards) or "one without a name"
            raise ValueError(f"{where}: grader {grade.grader}: {expected}, found {found}")
    # columns that a key of the recipe switches on: all tokens have them, or none
    for name, column in COLUMNS.items():
        if column.needed_by != "loss" or column.keep_key is None:
            continue
        wanted = name in recipe.rollout.columns
        if any(wanted != (name in part.tokens) and len(part) for part in rollout.parts):
            key, has = f"rollout.{column.keep_key}: {str(wanted).lower()}", "without" if wanted else "with"
            raise ValueError(f"{where}: {key}, found a rollout recorded {has} the column {name}")
