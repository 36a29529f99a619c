"""Responses without a reward: their grader or environment failed, or was late (``reward.on_error``).

Leaving them out is a selection: with a baseline that leaves out the response itself, the expected step is the
gradient of E[R | no failure], not of E[R]. As zeros, they teach the policy to avoid what fails.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from megatron_eqlen import metrics as m
from megatron_eqlen.processes.failures import ExpectedError
from megatron_eqlen.recipe import RewardRecipe
from megatron_eqlen.types import Metrics, Rollout


class UnscoredError(ExpectedError):
    """A step has more responses without a reward than the recipe allows."""


def leave_out(rollouts: Sequence[Rollout], reward: RewardRecipe) -> tuple[list[Rollout], Metrics]:
    """Return the rollouts without responses that have no reward, and how many these are and how long: all
    rollouts with ``on_error: zero``. A completion is left out alone, a stream or a tree as a whole, since its
    responses share parts."""
    kept: list[Rollout] = []
    lengths: list[int] = []
    unscored = 0
    for rollout in rollouts:
        failed = {part.number: part for part in rollout.unscored()}
        unscored += sum(not part.carried for part in failed.values())
        if not failed or rollout.suspended or reward.on_error == "zero":
            kept.append(rollout)
        elif rollout.kind == "independent":
            lengths += map(len, failed.values())
            if parts := [part for part in rollout.parts if part.number not in failed]:
                kept.append(replace(rollout, parts=parts))
        else:
            lengths += [line.length for line in rollout.lines()]
    metrics: Metrics = {m.REWARD_UNSCORED: unscored, m.REWARD_DROPPED: len(lengths)}
    return kept, metrics | ({m.REWARD_DROPPED_LENGTH: sum(lengths) / len(lengths)} if lengths else {})


def refuse_too_many(metrics: Metrics, causes: Sequence[str], reward: RewardRecipe) -> None:
    """Raise UnscoredError if more responses of a step have no reward than the recipe allows. One always may.
    ``metrics``: of harvest and scoring, of all ranks; ``causes``: what failed, with its prompt."""
    failed = metrics[m.REWARD_UNSCORED] + metrics.get(m.ENVIRONMENT_DROPPED, 0)
    scored = metrics[m.REWARD_ENDED] - (metrics[m.REWARD_UNSCORED] if reward.on_error == "zero" else 0)
    if failed > max(1, reward.max_unscored * (failed + scored)):
        raise UnscoredError(
            f"{failed:.0f} of {failed + scored:.0f} responses of a step have no reward, more than "
            f"reward.max_unscored: {reward.max_unscored:g} allows: "
            f"{next(iter(causes), 'their environments failed, see the warnings')}; the step is recorded, the "
            "same command grades it again"
        )
