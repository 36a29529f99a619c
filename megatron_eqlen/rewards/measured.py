"""Graded rollouts: those that training keeps, and metrics of rewards, verdicts and lengths."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from megatron_eqlen.recipe import RewardRecipe
from megatron_eqlen.rewards.scoring import UnscoredError, unscored_causes
from megatron_eqlen.sampling.comparison import response_reward
from megatron_eqlen.types import Grade, Metrics, Prompt, Rollout


def scored(rollouts: Sequence[Rollout], reward: RewardRecipe) -> tuple[list[Rollout], Metrics]:
    """Return the rollouts that ``leave_out`` keeps, and metrics of the responses that ended in this step."""
    kept, left_out = leave_out(rollouts, reward)
    return kept, reward_metrics(new_grades(kept)) | policy_metrics(kept) | left_out


def reward_metrics(ended: Sequence[tuple[Prompt, Grade | None]]) -> Metrics:
    """Return mean and spread of the rewards, per source too, and the shares of verdicts."""
    graded = [(prompt, grade) for prompt, grade in ended if grade is not None]
    assert len(graded) == len(ended), "a response that ended has no grade"
    metrics: Metrics = {"reward/ended": len(graded)}
    if not graded:
        return metrics
    rewards = np.array([grade.reward for _, grade in graded])
    metrics |= {"reward/mean": float(rewards.mean()), "reward/std": float(rewards.std())}
    metrics["reward/grader_seconds"] = sum(grade.seconds for _, grade in graded)
    # `weighed` holds all grades that have names against those in reward.weights
    for name in graded[0][1].rewards:
        of_name = [grade.rewards.get(name, 0.0) for _, grade in graded]
        metrics[f"reward/named/{name}"] = float(np.mean(of_name))
    verdicts = Counter(grade.verdict for _, grade in graded)
    metrics |= {f"reward/verdict/{verdict}": n / len(graded) for verdict, n in sorted(verdicts.items())}
    for source in sorted({prompt.source for prompt, _ in graded if prompt.source}):
        of_source = [grade.reward for prompt, grade in graded if prompt.source == source]
        metrics[f"reward/source/{source}/ended"] = len(of_source)
        metrics[f"reward/source/{source}/mean"] = sum(of_source) / len(of_source)
    return metrics


def new_grades(rollouts: Iterable[Rollout]) -> list[tuple[Prompt, Grade | None]]:
    """Return the grades of responses that ended in this step."""
    parts = ((rollout.prompt, part) for rollout in rollouts for part in rollout.parts if not part.carried)
    return [(prompt, part.grade) for prompt, part in parts if part.finish_reason == "stop"]


def policy_metrics(rollouts: Iterable[Rollout]) -> Metrics:
    """Return mean reward and length of the policy's responses, estimated without bias from complete scored
    rollouts of any kind. ``reward/mean``, over the responses of streams, is biased to longer ones."""
    from megatron_eqlen.processes.distributed import at_homes  # imports torch

    sampled = [rollout for rollout in rollouts if rollout.parts and not rollout.suspended]
    if not sampled:
        return {}

    def lines(rollout: Rollout) -> list[tuple[float, float]]:
        return [(w * response_reward(last, rollout.prompt_id), w * n) for w, n, last in rollout.lines()]

    known = [line for of_one in at_homes(sampled, lines) for line in of_one]
    reward, length = (sum(values) / len(sampled) for values in zip(*known, strict=True))
    return {"policy/rollouts": len(sampled), "policy/reward": reward, "policy/response_length": length}


def leave_out(rollouts: Sequence[Rollout], reward: RewardRecipe) -> tuple[list[Rollout], Metrics]:
    """Return the rollouts without responses that lack a reward, and how many and how long these are; all
    rollouts with ``on_error: zero``. A completion is left out alone, a stream or tree as a whole.

    That is a selection: with a baseline that leaves out the response itself, the expected step is the
    gradient of E[R | no failure], not of E[R]. As zeros, they teach the policy to avoid what fails.
    """
    kept: list[Rollout] = []
    lengths: list[int] = []
    for rollout in rollouts:
        failed = {part.number for part in rollout.unscored()}
        if not failed or reward.on_error == "zero":
            kept.append(rollout)
            continue
        # rewards of the other parts depend on the one that is missing
        if rollout.kind != "independent":
            failed |= {part.number for part in rollout.parts}
        if not rollout.suspended:  # then in the step that completes it
            lengths += [line.length for line in rollout.lines() if line.last.number in failed]
        if parts := [part for part in rollout.parts if part.number not in failed]:
            kept.append(replace(rollout, parts=parts))
    unscored = sum(not part.carried for rollout in rollouts for part in rollout.unscored())
    metrics: Metrics = {"reward/unscored": unscored, "reward/dropped": len(lengths)}
    return kept, metrics | ({"reward/dropped_length": sum(lengths) / len(lengths)} if lengths else {})


def refuse_too_many(rollouts: Sequence[Rollout], reward: RewardRecipe) -> None:
    """Raise UnscoredError if more responses of all ranks lack a reward than allowed; one always may."""
    unscored = [part for rollout in rollouts for part in rollout.unscored() if not part.carried]
    # where an environment failed, a response has no end
    of = len(new_grades(rollouts)) + sum(part.finish_reason != "stop" for part in unscored)
    if (failed := len(unscored)) > max(1, reward.max_unscored * of):
        found = f"{failed} of {of} responses of a step have no reward"
        allowed = f"more than reward.max_unscored: {reward.max_unscored:g} allows"
        remedy = "the step is recorded, the same command grades it again"
        raise UnscoredError(f"{found}, {allowed}: {unscored_causes(rollouts)[0]}; {remedy}")
