"""Registry of the named objectives.

A recipe's ``objective`` is a name from the table here, or the import path of an ``Objective`` of the user's
own (``my_package.my_module:MINE``).
"""

from __future__ import annotations

import dataclasses
import difflib
from typing import Any

from megatron_eqlen.objectives.advantages import Gr3, dr_grpo, grpo, reward, rloo
from megatron_eqlen.objectives.objective import Objective
from megatron_eqlen.recipe import Recipe
from megatron_eqlen.recipe.plugins import is_import_path, load_object

OVERLONG_BUFFER = 4096
"""Tokens of DAPO's length-penalty buffer, with responses of 20,480 tokens. For shorter responses we take the
same fifth (our choice)."""

OBJECTIVES = {
    objective.name: objective
    for objective in [
        Objective("grpo", grpo, "seq-mean-token-mean", "token", 0.2, 0.2),
        Objective("dr_grpo", dr_grpo, "seq-mean-token-sum-norm", "token", 0.2, 0.2),
        Objective(
            "dapo",
            grpo,
            "token-mean",
            "token",
            clip_ratio_low=0.2,
            clip_ratio_high=0.28,
            clip_ratio_c=10.0,
            overlong_buffer=OVERLONG_BUFFER,
            dynamic_sampling=True,
        ),
        Objective("gspo", grpo, "seq-mean-token-mean", "sequence", 3e-4, 4e-4),
        Objective("luspo", grpo, "seq-mean-token-sum", "sequence", 2e-3, 2.5e-3),
        Objective("rloo", rloo, "seq-mean-token-mean", "none"),
        Objective("gr3", Gr3(), "seq-mean-token-mean", "token", 0.2, 0.2),
        Objective("vespo", dr_grpo, "token-mean", "vespo"),
        Objective("dler", dr_grpo, "token-mean", "token", 0.2, 0.28, whitened="scale", dynamic_sampling=True),
        Objective("treerpo", dr_grpo, "seq-mean-token-mean", "token", 0.2, 0.2),
        Objective("ba", grpo, "balanced-token-mean", "token", 0.2, 0.2),
        Objective("cispo", grpo, "token-mean", "cispo", 1.0, 4.0),
        Objective("reinforce_pp", reward, "token-mean", "token", 0.2, 0.2, whitened="standardize"),
        Objective("reinforce_pp_baseline", dr_grpo, "token-mean", "token", 0.2, 0.2, whitened="scale"),
    ]
}

WITHOUT_EQUATIONS = ("p_gspo", "t2t", "lspo")
"""Methods that the paper names and that have no complete public equation."""


def lookup(name: str) -> Objective:
    """Return the objective with its paper's settings, or a user's own by import path.

    Raises ValueError, naming the nearest, for an unknown name.
    """
    if is_import_path(name):
        return load_object(name, "objective", Objective)
    if name.lower().replace("-", "_") in WITHOUT_EQUATIONS:
        raise ValueError(f"objective: {name} is not here, because its full equations are not public")
    if name not in OBJECTIVES:
        near = difflib.get_close_matches(name, OBJECTIVES, n=1, cutoff=0.0)[0]
        raise ValueError(f"objective: {name!r} is not one of {', '.join(OBJECTIVES)} (nearest: {near!r})")
    return OBJECTIVES[name]


def resolve(recipe: Recipe) -> Objective:
    """Return the recipe's objective: the method's defaults, overridden by the ``loss`` keys that are set.

    ``equal_length.pair_weight: on_policy`` sums tokens in place of the method's average, and does not divide
    advantages by the standard deviation of a pair, which would leave only the sign of its gap.
    """
    objective, loss = lookup(recipe.objective), recipe.loss
    named = ("clip_ratio_low", "clip_ratio_high", "clip_ratio_c", "overlong_factor", "dynamic_sampling")
    changes: dict[str, Any] = {key: getattr(loss, key) for key in named if getattr(loss, key) is not None}
    if is_on_policy(recipe):
        changes["aggregation"] = "seq-mean-token-sum-norm"
        if objective.advantage is grpo:
            changes["advantage"] = rloo
    if loss.loss_agg_mode is not None:
        changes["aggregation"] = loss.loss_agg_mode
    if loss.gr3_alpha is not None and isinstance(objective.advantage, Gr3):
        changes["advantage"] = Gr3(loss.gr3_alpha)
    if loss.overlong_buffer is not None:
        changes["overlong_buffer"] = loss.overlong_buffer
    elif objective.overlong_buffer:
        changes["overlong_buffer"] = min(OVERLONG_BUFFER, recipe.rollout.max_response_length // 5)
    if objective.ratio == "none" and "clip_ratio_low" in changes:
        changes["ratio"] = "token"
    return dataclasses.replace(objective, **changes)


def is_on_policy(recipe: Recipe) -> bool:
    return recipe.sampling == "equal_length" and recipe.equal_length.pair_weight == "on_policy"


def with_defaults(recipe: Recipe) -> Recipe:
    """Return the recipe with the objective's defaults in the ``loss`` keys that were left out. A key that is
    still None has no meaning for the objective."""
    objective = resolve(recipe)
    loss: dict[str, Any] = {
        "clip_ratio_low": objective.clip_ratio_low,
        "clip_ratio_high": objective.clip_ratio_high,
        "clip_ratio_c": objective.clip_ratio_c,
        "loss_agg_mode": objective.aggregation,
        "overlong_buffer": objective.overlong_buffer,
        "dynamic_sampling": objective.dynamic_sampling,
    }
    if objective.overlong_buffer:
        loss["overlong_factor"] = objective.overlong_factor
    if isinstance(objective.advantage, Gr3):
        loss["gr3_alpha"] = objective.advantage.alpha
    return recipe.model_copy(update={"loss": recipe.loss.model_copy(update=loss)})
