"""Advice from any scored rollouts, before or while they train: what forks and token baselines are worth."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from megatron_eqlen.objectives.token_baseline import fitted, prompt_mean, token_baselines
from megatron_eqlen.recipe import Recipe
from megatron_eqlen.sampling import KINDS
from megatron_eqlen.sampling.comparison import ComparisonUnit, no_penalty
from megatron_eqlen.sampling.profile import (
    LEAST,
    Factor,
    Profile,
    outcome_profile,
    resampled,
    without_profile,
)
from megatron_eqlen.types import Rollout


def baseline_gain(rollouts: Sequence[Rollout], recipe: Recipe) -> Factor | None:
    """Return what ``loss.baseline: fitted`` gives these rollouts; None where nothing can be compared. Scores
    of tokens are taken for orthogonal and equally large."""
    units: list[ComparisonUnit] = []
    for number, rollout in enumerate(rollouts):
        for unit in KINDS["tree"].compare(rollout, recipe, no_penalty)[1]:
            unit.rollout = number
            units.append(unit)
    # [prompts, (with the prompt's mean, fitted)]
    noise: dict[str, np.ndarray] = defaultdict(lambda: np.zeros(2))
    # squared distances of rewards from what they are compared with, weighed as in the gradient's noise
    for column, baseline in enumerate((prompt_mean, fitted)):
        values = token_baselines(units, rollouts, baseline, recipe.rollout.max_response_length)
        for unit, baselines in zip(units, values, strict=True):
            weight = (unit.share or 0.0) / len(unit.members)
            for reward, known in zip(unit.rewards, baselines, strict=True):
                if known is not None:
                    noise[unit.prompt_id][column] += weight**2 * np.square(reward - known).sum()
    sums = np.array([*noise.values()]).reshape(-1, 2)
    if not sums.size or sums.sum(0).min() <= 0:
        return None
    # an interval over prompts: rewards of one prompt are not independent
    low, high = np.quantile([d[0] / d[1] for d in resampled(sums) if d.min() > 0], [0.025, 0.975])
    return Factor(float(sums[:, 0].sum() / sums[:, 1].sum()), float(low), float(high))


def advice(rollouts: Sequence[Rollout], recipe: Recipe) -> tuple[Profile | None, str]:
    """Return the profile of complete scored rollouts, and a sentence on what pays."""
    selection, baseline = without_profile(rollouts, recipe), baseline_gain(rollouts, recipe)
    profile = None if selection else outcome_profile(rollouts)
    tree = recipe.tree_sampling
    after = f" after {tree.marker!r}" if recipe.sampling == "tree" and tree.fork == "marker" else ""
    if profile is None:
        few = f"no line forked, no reward varies, or there are fewer than {LEAST} rollouts"
        forked = f"forks{after}: not known, as {selection or few}"
    else:
        # ends of the profile's parts, as shares of a response
        places = ", ".join(f"{end:.0%}" for end in profile.ends[:-1])
        pay = f": at {profile.place:.0%} {profile.lines} lines give about {profile.gain} signal per token,"
        # forks pay where the whole interval of their gain is above 1
        pays = pay if profile.gain.low > 1 else " are not seen to pay"
        forked = f"forks{after} at {places} of a response{pays} over the same baseline alone"
    sentence = f"{forked}; a token baseline (loss.baseline: fitted): {baseline or 'not known'}"
    return profile, f"{sentence} ({len({rollout.prompt_id for rollout in rollouts})} prompts)"
