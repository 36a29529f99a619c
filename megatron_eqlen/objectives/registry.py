"""Registry of the named objectives. A recipe's ``objective`` is a name from the table here, or the import
path of an ``Objective`` of the user's own (``my_package.my_module:MINE``)."""

from __future__ import annotations

import dataclasses
import difflib
from typing import Any

from megatron_eqlen.objectives.advantages import dr_grpo, gr3, grpo, maxrl, reward, rloo
from megatron_eqlen.objectives.aggregation import (
    AGGREGATIONS,
    balanced_token_mean,
    delta_l,
    seq_mean_token_mean,
    seq_mean_token_sum,
    seq_mean_token_sum_norm,
    token_mean,
)
from megatron_eqlen.objectives.objective import Objective, ResolvedRecipe
from megatron_eqlen.objectives.parts import name_of, named_parts, options
from megatron_eqlen.objectives.surrogates import (
    Cispo,
    Ctpo,
    Dppo,
    Gspo,
    Ppo,
    Reinforce,
    Sapo,
    Surrogate,
    Vespo,
)
from megatron_eqlen.objectives.token_baseline import BASELINES
from megatron_eqlen.recipe import SFT, LossRecipe, Recipe
from megatron_eqlen.recipe.plugins import is_import_path, load_object

OVERLONG_BUFFER = 4096
"""Tokens of DAPO's length-penalty buffer for responses of 20,480; shorter ones get the same fifth (ours)."""

DAPO = Ppo(0.2, 0.28, clip_ratio_c=10.0)
LSPO = (0.3, 0.65, 0.95)
BY_LENGTH = {"on_policy": "it averages by length, which these weights replace by a sum; use grpo or dr_grpo"}
OBJECTIVES = {
    objective.name: objective
    for objective in [
        Objective("grpo", grpo, seq_mean_token_mean, Ppo()),
        Objective("dr_grpo", dr_grpo, seq_mean_token_sum_norm, Ppo()),
        Objective("dapo", grpo, token_mean, DAPO, overlong_buffer=OVERLONG_BUFFER, dynamic_sampling=True),
        Objective("gdpo", grpo, seq_mean_token_mean, Ppo(), whitened="scale", rewards="apart"),
        Objective("gspo", grpo, seq_mean_token_mean, Gspo()),
        Objective("ctpo", grpo, token_mean, Ctpo()),
        Objective("luspo", grpo, seq_mean_token_sum, Gspo(2e-3, 2.5e-3)),
        Objective("lspo", grpo, seq_mean_token_mean, Ppo(), dynamic_sampling=True, length_quantiles=LSPO),
        Objective("rloo", rloo, seq_mean_token_mean, Reinforce()),
        Objective("gr3", gr3, seq_mean_token_mean, Ppo()),
        Objective("vespo", dr_grpo, token_mean, Vespo()),
        Objective("dler", dr_grpo, token_mean, Ppo(0.2, 0.28), whitened="scale", dynamic_sampling=True),
        Objective("treerpo", dr_grpo, seq_mean_token_mean, Ppo(), forks="equal"),
        Objective("grpo_ma", grpo, seq_mean_token_mean, Ppo(), forks="pooled"),
        Objective("ba", grpo, balanced_token_mean, Ppo(), refuses=BY_LENGTH),
        Objective("cispo", grpo, token_mean, Cispo()),
        Objective("sapo", grpo, seq_mean_token_mean, Sapo()),
        Objective("dppo", dr_grpo, seq_mean_token_sum_norm, Dppo()),
        Objective("maxrl", maxrl, seq_mean_token_sum_norm, Ppo()),
        Objective("delta_l", dr_grpo, delta_l, Ppo(), refuses=BY_LENGTH),
        Objective("reinforce_pp", reward, token_mean, Ppo(), whitened="standardize"),
        Objective("reinforce_pp_baseline", dr_grpo, token_mean, Ppo(), whitened="scale"),
    ]
}

SUPERVISED = Objective(SFT, reward, token_mean, Reinforce())
"""Supervised training: the token mean of -log pi. The reward of each response in the data is 1."""

NOT_HERE = {
    "p_gspo": "its paper was withdrawn, and its full equations are not public",
    "t2t": "the equations of its paper (arXiv 2602.04265v3) are not transcribed; an advantage of your own "
    "can be named by import path (loss.advantage)",
}
"""Methods that the paper names and that are not implemented, with the reason."""


def lookup(name: str) -> Objective:
    """Return the objective with its paper's settings, or a user's own by import path. Raises ValueError."""
    if is_import_path(name):
        return load_object(name, "objective", Objective)
    if reason := NOT_HERE.get(name.lower().replace("-", "_")):
        raise ValueError(f"objective: {name} is not here: {reason}")
    known = OBJECTIVES | {SFT: SUPERVISED}
    if name not in known:
        near = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.0)[0]
        raise ValueError(f"objective: {name!r} is not one of {', '.join(known)} (nearest: {near!r})")
    return known[name]


def resolve(recipe: Recipe) -> Objective:
    """Return a ``Job``'s objective: the method's defaults, overridden by the ``loss`` keys that are set. In
    trees and with ``equal_length.pair_weight: on_policy`` tokens are summed in place of the method's average,
    and advantages not divided by the standard deviation of a pair, which leaves only the sign of its gap."""
    objective, loss = lookup(recipe.objective), recipe.loss
    named = ("overlong_buffer", "overlong_factor", "dynamic_sampling", "length_quantiles", "rewards")
    changes: dict[str, Any] = {key: getattr(loss, key) for key in named if getattr(loss, key) is not None}
    # shares of units take the place of an average by length, and of a pair's standard deviation
    if is_on_policy(recipe, objective):
        changes["aggregation"] = seq_mean_token_sum_norm
        if objective.advantage is grpo:
            changes["advantage"] = rloo
    if loss.overlong_buffer is None:
        changes["overlong_buffer"] = min(objective.overlong_buffer, recipe.rollout.max_response_length // 5)
    objective = dataclasses.replace(objective, **changes | named_parts(loss))
    return dataclasses.replace(objective, surrogate=_with_clip(objective.surrogate, loss))


def clip_keys(loss: LossRecipe) -> dict[str, float]:
    """Return the clip keys that the recipe sets."""
    keys = ("clip_ratio_low", "clip_ratio_high", "clip_ratio_c")
    return {key: getattr(loss, key) for key in keys if getattr(loss, key) is not None}


def _with_clip(surrogate: Surrogate, loss: LossRecipe) -> Surrogate:
    """Return the surrogate with the recipe's clip keys as options; a clipped policy gradient is PPO's."""
    keys = clip_keys(loss)
    if isinstance(surrogate, Reinforce) and keys.keys() & {"clip_ratio_low", "clip_ratio_high"}:
        return Ppo(loss.clip_ratio_low, loss.clip_ratio_high, loss.clip_ratio_c)
    changes = {key: value for key, value in keys.items() if key in options(surrogate)}
    return dataclasses.replace(surrogate, **changes) if changes else surrogate  # pyright: ignore[reportArgumentType, reportUnknownVariableType]


def is_on_policy(recipe: Recipe, objective: Objective) -> bool:
    """Return True if units' shares of their rollout make the gradient that of the expected reward."""
    if recipe.sampling == "tree":
        return objective.forks == "apart"
    return recipe.sampling == "equal_length" and recipe.equal_length.pair_weight == "on_policy"


def with_defaults(job: ResolvedRecipe) -> Recipe:
    """Return the recipe with the objective's defaults in ``loss``; a key that stays None has no meaning."""
    recipe, objective = job.recipe, job.objective
    loss: dict[str, Any] = {
        **{key: v for key, v in options(objective.surrogate).items() if key in LossRecipe.model_fields},
        "loss_agg_mode": name_of(objective.aggregation, AGGREGATIONS) or recipe.loss.loss_agg_mode,
        "baseline": name_of(objective.baseline, BASELINES) or recipe.loss.baseline,
        "overlong_buffer": objective.overlong_buffer,
        "dynamic_sampling": objective.dynamic_sampling,
        "length_quantiles": objective.length_quantiles,
    }
    # keys that act only beside others stay as they are without these
    if recipe.reward.weights:
        loss["rewards"] = objective.rewards
    if objective.overlong_buffer:
        loss["overlong_factor"] = objective.overlong_factor
    return recipe.model_copy(update={"loss": recipe.loss.model_copy(update=loss)})
