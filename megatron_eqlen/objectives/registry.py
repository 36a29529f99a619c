"""The named objectives as data, and which of them go with the rest of a recipe.

An ``Objective`` says four things: how rewards become advantages, how tokens are averaged (verl's
``loss_agg_mode`` names), what the importance ratio is taken over, and which clip range the method's own
paper uses. Everything else about training is the same for all of them.
"""

from __future__ import annotations

import dataclasses
import difflib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from megatron_eqlen.recipe.schema import Recipe

Advantage = Literal["grpo", "dr_grpo", "rloo", "gr3", "batch_whitened"]
Aggregation = Literal[
    "seq-mean-token-mean",
    "seq-mean-token-sum",
    "seq-mean-token-sum-norm",
    "token-mean",
    "prompt-mean-token-mean",
]
Surrogate = Literal["token", "sequence", "none", "vespo"]


@dataclass(frozen=True)
class Objective:
    """One method, with the recipe's own keys already applied by ``resolve``."""

    name: str
    advantage: Advantage
    aggregation: Aggregation
    ratio: Surrogate
    """``token``: clipped ratio of each token. ``sequence``: clipped geometric mean over the segment.
    ``none``: plain -A log pi. ``vespo``: the detached kernel phi(W) in front of -A log pi."""
    clip_ratio_low: float | None = None
    """The ratio is clipped below 1 - this; None: not clipped."""
    clip_ratio_high: float | None = None
    clip_ratio_c: float | None = None
    """Dual clip: with a negative advantage the loss of a token is at most -c x advantage."""
    overlong_buffer: int = 0
    """Tokens before max_response_length where the length penalty starts; 0: no penalty."""
    overlong_factor: float = 1.0
    dynamic_sampling: bool = False
    """Prompts whose rewards are all equal are replaced by freshly sampled ones."""
    gr3_alpha: float = 0.0
    vespo_positive: tuple[float, float] = (2.0, 3.0)
    """(k, lambda) of phi(W) = W^k exp(lambda (1 - W)) where the advantage is >= 0."""
    vespo_negative: tuple[float, float] = (3.0, 2.0)

    @property
    def clips(self) -> bool:
        return self.clip_ratio_low is not None


OVERLONG_BUFFER = 4096
"""DAPO's, at its 20,480 tokens; our choice for shorter responses is the same fifth."""

OBJECTIVES = {
    objective.name: objective
    for objective in [
        Objective("grpo", "grpo", "seq-mean-token-mean", "token", 0.2, 0.2),
        Objective("dr_grpo", "dr_grpo", "seq-mean-token-sum-norm", "token", 0.2, 0.2),
        Objective(
            "dapo",
            "grpo",
            "token-mean",
            "token",
            clip_ratio_low=0.2,
            clip_ratio_high=0.28,
            clip_ratio_c=10.0,
            overlong_buffer=OVERLONG_BUFFER,
            dynamic_sampling=True,
        ),
        Objective("gspo", "grpo", "seq-mean-token-mean", "sequence", 3e-4, 4e-4),
        Objective("luspo", "grpo", "seq-mean-token-sum", "sequence", 2e-3, 2.5e-3),
        Objective("rloo", "rloo", "seq-mean-token-mean", "none"),
        Objective("gr3", "gr3", "seq-mean-token-mean", "token", 0.2, 0.2, gr3_alpha=0.33),
        Objective("vespo", "dr_grpo", "token-mean", "vespo"),
        Objective("dler", "batch_whitened", "token-mean", "token", 0.2, 0.28, dynamic_sampling=True),
        Objective("treerpo", "dr_grpo", "seq-mean-token-mean", "token", 0.2, 0.2),
    ]
}


def lookup(name: str) -> Objective:
    """The objective as its paper has it. Raises ValueError, naming the nearest, for an unknown name."""
    if name not in OBJECTIVES:
        near = difflib.get_close_matches(name, OBJECTIVES, n=1, cutoff=0.0)[0]
        raise ValueError(f"objective: {name!r} is not one of {', '.join(OBJECTIVES)} (nearest: {near!r})")
    return OBJECTIVES[name]


def resolve(recipe: Recipe) -> Objective:
    """The recipe's objective: the method's defaults, overridden by the ``loss`` keys that are set."""
    objective, loss = lookup(recipe.objective), recipe.loss
    named = ("clip_ratio_low", "clip_ratio_high", "clip_ratio_c", "overlong_factor", "dynamic_sampling")
    changes = {key: getattr(loss, key) for key in named if getattr(loss, key) is not None}
    if loss.loss_agg_mode is not None:
        changes["aggregation"] = loss.loss_agg_mode
    if loss.gr3_alpha is not None:
        changes["gr3_alpha"] = loss.gr3_alpha
    if loss.overlong_buffer is not None:
        changes["overlong_buffer"] = loss.overlong_buffer
    elif objective.overlong_buffer:
        changes["overlong_buffer"] = min(OVERLONG_BUFFER, recipe.rollout.max_response_length // 5)
    if objective.ratio == "none" and "clip_ratio_low" in changes:
        changes["ratio"] = "token"
    return dataclasses.replace(objective, **changes)


def check_combination(recipe: Recipe) -> None:
    """Raise ValueError, with the reason, where the objective and the rest of the recipe do not fit."""
    objective = resolve(recipe)
    _check_sampling(recipe, objective)
    _check_clip(recipe, objective)
    _check_ratio(recipe, objective)
    _check_rewards(recipe, objective)


def _check_sampling(recipe: Recipe, objective: Objective) -> None:
    if (objective.name == "treerpo") != (recipe.sampling == "tree"):
        raise ValueError(
            f"objective: {objective.name} with sampling: {recipe.sampling}: treerpo and sampling: tree "
            f"belong together (only treerpo says what an inner node's reward is)"
        )
    if recipe.sampling == "equal_length" and objective.name == "gr3":
        raise ValueError(
            "objective: gr3 with sampling: equal_length: gr3 scales rewards by length / mean length of the "
            "group, which is 1 for both sides of an equal-length pair; use dr_grpo, which it then equals "
            "up to the factor 1 / (1 + alpha)"
        )
    if recipe.sampling != "equal_length":
        for key in ("single_pair", "prefix_in_gradient"):
            if getattr(recipe.equal_length, key):
                raise ValueError(
                    f"equal_length.{key}: true needs sampling: equal_length, found {recipe.sampling}"
                )
    if recipe.equal_length.single_pair and (recipe.equal_length.max_pairs or 1) > 1:
        raise ValueError(
            f"equal_length.single_pair: true stops after one pair, found max_pairs "
            f"{recipe.equal_length.max_pairs}"
        )


def _check_clip(recipe: Recipe, objective: Objective) -> None:
    low, high = recipe.loss.clip_ratio_low, recipe.loss.clip_ratio_high
    if objective.ratio == "vespo" and (low, high, recipe.loss.clip_ratio_c) != (None, None, None):
        raise ValueError(
            "objective: vespo has a soft kernel in place of clipping: leave loss.clip_ratio_* out"
        )
    if (objective.clip_ratio_low is None) != (objective.clip_ratio_high is None):
        raise ValueError(
            f"objective: {objective.name} does not clip by itself: set both loss.clip_ratio_low and "
            f"loss.clip_ratio_high, found {low} and {high}"
        )
    if objective.clip_ratio_low is not None and objective.clip_ratio_low > 1:
        raise ValueError(
            f"loss.clip_ratio_low: {low}: 1 - {low} is below zero, where no ratio lies; expected at most 1"
        )
    if objective.clip_ratio_c is not None and not objective.clips:
        raise ValueError(
            f"loss.clip_ratio_c: {objective.clip_ratio_c} bounds a clipped ratio, and "
            f"{objective.name} has none: set loss.clip_ratio_low and loss.clip_ratio_high too"
        )


def _check_ratio(recipe: Recipe, objective: Objective) -> None:
    loss = recipe.loss
    if objective.ratio == "vespo" and loss.rollout_is != "none":
        raise ValueError(
            f"loss.rollout_is: {loss.rollout_is}: vespo's kernel takes an importance weight already; use "
            f"loss.old_logprobs: rollout to take it over the engine's log-probs"
        )
    updates = loss.minibatches * loss.epochs
    if objective.ratio == "none" and updates > 1:
        raise ValueError(
            f"objective: {objective.name} without clipping has no importance ratio, so only a harvest's "
            f"first update is on-policy: loss.minibatches {loss.minibatches} x loss.epochs {loss.epochs} = "
            f"{updates} updates need loss.clip_ratio_low and loss.clip_ratio_high"
        )
    if loss.minibatches > recipe.data.prompts_per_step:
        raise ValueError(
            f"loss.minibatches: {loss.minibatches} is more than data.prompts_per_step "
            f"{recipe.data.prompts_per_step}; a minibatch holds whole prompts"
        )
    if loss.old_logprobs == "rollout" and recipe.rollout.logprobs_mode == "processed":
        raise ValueError(
            "loss.old_logprobs: rollout needs rollout.logprobs_mode: raw: log-probs after top-k and top-p "
            "are of another distribution than the trainer's, and ratios would not start at 1"
        )
    if loss.old_logprobs == "rollout" and loss.rollout_is != "none":
        raise ValueError(
            f"loss.rollout_is: {loss.rollout_is} corrects old log-probs that the trainer recomputed; with "
            f"loss.old_logprobs: rollout the ratio already starts from the engine's"
        )


def _check_rewards(recipe: Recipe, objective: Objective) -> None:
    longest = recipe.rollout.max_response_length
    if objective.overlong_buffer >= longest:
        raise ValueError(
            f"loss.overlong_buffer: {objective.overlong_buffer} tokens do not lie inside "
            f"rollout.max_response_length {longest}"
        )
    if recipe.sampling == "tree" and objective.overlong_buffer:
        raise ValueError(
            f"loss.overlong_buffer: {objective.overlong_buffer}: a step of a sampled tree has the mean "
            f"reward of responses of many lengths; a penalty needs sampling: equal_length or independent"
        )
    if recipe.loss.overlong_factor is not None and not objective.overlong_buffer:
        raise ValueError(
            f"loss.overlong_factor: {recipe.loss.overlong_factor} scales a length penalty that objective: "
            f"{objective.name} does not have: set loss.overlong_buffer too"
        )
    if recipe.loss.gr3_alpha is not None and objective.name != "gr3":
        raise ValueError(f"loss.gr3_alpha: only objective: gr3 has it, found objective: {objective.name}")
