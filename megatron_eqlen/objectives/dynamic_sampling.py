"""Dynamic sampling (DAPO): a step trains the prompts whose rewards differ from what they are compared with.
The loop replaces the others."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_eqlen.objectives.build import has_gradient
from megatron_eqlen.objectives.registry import resolve
from megatron_eqlen.objectives.units import due_rollouts
from megatron_eqlen.recipe import Recipe
from megatron_eqlen.rewards.scoring import leave_out
from megatron_eqlen.types import Rollout


def trained(rollouts: Sequence[Rollout], recipe: Recipe) -> Sequence[Rollout]:
    """Return the recorded rollouts of a step that it trained on."""
    rollouts = due_rollouts(leave_out(rollouts, recipe.reward)[0])
    if not resolve(recipe).dynamic_sampling:
        return rollouts
    return select(rollouts, recipe, recipe.data.prompts_per_step)[0]


def select(rollouts: Sequence[Rollout], recipe: Recipe, room: int) -> tuple[list[Rollout], int]:
    """Return (the rollouts of the first ``room`` prompts that have a gradient, the number of prompts that
    have none). With ``rollout.carry_over`` there is room for all: no later step trains the same units.

    Length penalties do not count, as in DAPO: a group that is all correct teaches nothing about the problem.
    """
    differs = has_gradient(rollouts, recipe)
    keep = [prompt_id for prompt_id, varies in differs.items() if varies]
    kept = set(keep if recipe.rollout.carry_over else keep[:room])
    return [rollout for rollout in rollouts if rollout.prompt_id in kept], len(differs) - len(keep)
