"""DAPO's dynamic sampling: prompts that have nothing to teach are replaced by fresh ones.

    refill = Refill(recipe)
    while refill.wanted:
        rollouts = score(harvest(next_prompts(refill.wanted)))
        refill.add(rollouts)
    trees = build_trees(refill.rollouts, ...)

Without dynamic sampling the loop runs once and keeps everything.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron_eqlen.objectives.advantages import all_equal
from megatron_eqlen.objectives.registry import resolve
from megatron_eqlen.objectives.units import verifier_rewards
from megatron_eqlen.recipe import Recipe
from megatron_eqlen.types import Metrics, Rollout


class Refill:
    """Collects a step's rollouts until ``data.prompts_per_step`` prompts are kept, or
    ``loss.max_num_gen_batches`` batches were generated: the step then trains what there is."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.filters = resolve(recipe).dynamic_sampling
        self.rollouts: list[Rollout] = []
        """Of the kept prompts, in the order they came."""
        self.batches = 0
        self.kept = 0
        self.dropped = 0

    @property
    def wanted(self) -> int:
        """Prompts to generate next; 0: the step is complete."""
        limit = self.recipe.loss.max_num_gen_batches if self.filters else 1
        return self.recipe.data.prompts_per_step - self.kept if self.batches < limit else 0

    def add(self, rollouts: Sequence[Rollout]) -> None:
        """Take in the scored rollouts of the ``wanted`` prompts; a prompt is in one batch only."""
        keep, drop = filter_groups(rollouts, self.recipe)
        if not self.filters:
            keep, drop = keep + drop, []
        chosen = set(keep)
        self.rollouts += [rollout for rollout in rollouts if rollout.prompt_id in chosen]
        self.batches += 1
        self.kept += len(keep)
        self.dropped += len(drop)

    def metrics(self) -> Metrics:
        return {
            "dynamic_sampling/batches": float(self.batches),
            "dynamic_sampling/kept_prompts": float(self.kept),
            "dynamic_sampling/dropped_prompts": float(self.dropped),
        }


def filter_groups(rollouts: Sequence[Rollout], recipe: Recipe) -> tuple[list[str], list[str]]:
    """(prompt_ids to keep, prompt_ids to drop), each in order of appearance.

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
