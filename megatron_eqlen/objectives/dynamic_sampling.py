"""Dynamic sampling: keeps the prompts that a step trains. The loop replaces the others.

DAPO keeps the prompts whose rewards differ from what they are compared with. LSPO (arXiv 2510.01459) keeps of
these the prompts with short and with long responses: with L(q) the mean length of the responses to q,

    L(q) <= Q(low)  or  Q(high) <= L(q) <= Q(max)

where Q(a) is the least t such that at least the share a of these prompts, as drawn together, has L(q) <= t.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean

from megatron_eqlen.objectives.build import has_gradient
from megatron_eqlen.objectives.objective import ResolvedRecipe
from megatron_eqlen.objectives.units import due_rollouts
from megatron_eqlen.recipe import Recipe
from megatron_eqlen.rewards.measured import leave_out
from megatron_eqlen.types import Rollout

ROUND_OFF = 1e-9
"""Tolerance of a share of prompts: 0.55 of 100 prompts are 55, not 56."""


def filter_groups(rollouts: Sequence[Rollout], job: ResolvedRecipe) -> tuple[list[str], list[str]]:
    """Return (prompt_ids to keep, prompt_ids to drop), each in order of appearance. A prompt is kept if it
    ``has_gradient``: a group that is all correct teaches nothing about the problem, whatever the length
    penalties (as in DAPO). ``loss.length_quantiles`` drops prompts of medium length, too."""
    differs = has_gradient(rollouts, job)
    quantiles = job.objective.length_quantiles
    if quantiles is not None:
        # LSPO: of prompts that differ only those with short or long responses
        left = [rollout for rollout in rollouts if differs[rollout.prompt_id]]
        for lengths in _mean_lengths_by_draw(left, job.recipe):
            extreme = _extremes(lengths, quantiles)
            differs |= {prompt_id: prompt_id in extreme for prompt_id in lengths}
    keep = [prompt_id for prompt_id, varies in differs.items() if varies]
    return keep, [prompt_id for prompt_id, varies in differs.items() if not varies]


def _mean_lengths_by_draw(rollouts: Sequence[Rollout], recipe: Recipe) -> list[dict[str, float]]:
    """Return the mean response length of each prompt, for each set that was drawn together in a step."""
    lengths: dict[int, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rollout in rollouts:
        # prompts are numbered as they are drawn, a step's number at a time
        draw = rollout.prompt.number // recipe.data.prompts_per_step
        # a part that the budget cut off is no response
        lengths[draw][rollout.prompt_id] += [len(part) for part in rollout.parts if part.finish_reason]
    return [{prompt_id: fmean(own) for prompt_id, own in prompts.items()} for prompts in lengths.values()]


def _extremes(lengths: Mapping[str, float], quantiles: tuple[float, float, float]) -> set[str]:
    """Return the prompts with a mean length up to the low quantile, or from the high one to the maximum."""
    ordered = sorted(lengths.values())
    low, high, top = (ordered[math.ceil(share * len(ordered) - ROUND_OFF) - 1] for share in quantiles)
    return {prompt_id for prompt_id, length in lengths.items() if length <= low or high <= length <= top}


def trained(rollouts: Sequence[Rollout], job: ResolvedRecipe, room: int | None = None) -> Sequence[Rollout]:
    """Return the recorded rollouts of a step that it trained on. ``room``: see ``select``."""
    rollouts = due_rollouts(leave_out(rollouts, job.recipe.reward)[0])
    if not job.objective.dynamic_sampling:
        return rollouts
    return select(rollouts, job, job.recipe.data.prompts_per_step if room is None else room)[0]


def select(rollouts: Sequence[Rollout], job: ResolvedRecipe, room: int) -> tuple[list[Rollout], int]:
    """Return (rollouts of the first ``room`` prompts that are kept, number of prompts dropped). With
    ``rollout.carry_over`` there is room for all: no later step trains the same units."""
    keep, dropped = filter_groups(rollouts, job)
    kept = set(keep if job.recipe.rollout.carry_over else keep[:room])
    return [rollout for rollout in rollouts if rollout.prompt_id in kept], len(dropped)
