"""DAPO's dynamic sampling: keeps the prompts whose rewards differ. The loop replaces the others."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_eqlen.objectives.registry import resolve
from megatron_eqlen.objectives.units import due_rollouts, verifier_rewards
from megatron_eqlen.recipe import Recipe
from megatron_eqlen.sampling.comparison import all_equal
from megatron_eqlen.types import Rollout


def filter_groups(rollouts: Sequence[Rollout], recipe: Recipe) -> tuple[list[str], list[str]]:
    """Return (prompt_ids to keep, prompt_ids to drop), each in order of appearance.

    A prompt is kept if the verifier's rewards differ inside at least one of its comparison units (its group,
    a pair of its streams). Length penalties do not count, as in DAPO: a group that is all correct teaches
    nothing about the problem.
    """
    differs = {rollout.prompt_id: False for rollout in rollouts}
    for rollout in rollouts:
        units = verifier_rewards(rollout, recipe)
        differs[rollout.prompt_id] |= any(rewards and not all_equal(rewards) for rewards in units)
    keep = [prompt_id for prompt_id, found in differs.items() if found]
    return keep, [prompt_id for prompt_id, found in differs.items() if not found]


def trained(rollouts: Sequence[Rollout], recipe: Recipe) -> Sequence[Rollout]:
    """Return the recorded rollouts of a step that it trained on."""
    rollouts = due_rollouts(rollouts, recipe)
    if not resolve(recipe).dynamic_sampling:
        return rollouts
    return select(rollouts, recipe, recipe.data.prompts_per_step)[0]


def select(rollouts: Sequence[Rollout], recipe: Recipe, room: int) -> tuple[list[Rollout], int]:
    """Return (the rollouts of the first ``room`` prompts that are kept, the number of prompts with equal
    rewards). With ``rollout.carry_over`` there is room for all: no later step trains the same units."""
    keep, dropped = filter_groups(rollouts, recipe)
    kept = set(keep if recipe.rollout.carry_over else keep[:room])
    return [rollout for rollout in rollouts if rollout.prompt_id in kept], len(dropped)
