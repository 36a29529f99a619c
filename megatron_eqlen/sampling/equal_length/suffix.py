"""Rewards of a stream's pairs: the verifier's grade of A_i, and a reduction over the responses that extend
B_i.

A_i ended, so its reward is its own grade. B_i joined the trunk; its reward is taken from every ended response
that extends it: A_{i+1}, A_{i+2}, ..., a last B_N that ended together with A_N, and an ended tail. The paper
takes their maximum; the mean is its ablation. A both-ended B_N is a response itself: its reward is its
own grade.

A length penalty is added to each response before they are reduced. A trunk that reached the limit then is a
response as well, with reward 0 and the full penalty, and counts in the mean (nothing is less, so no maximum
needs it). Otherwise B_i would escape a penalty that the shorter A_i pays.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from megatron_eqlen.sampling.comparison import Penalty, no_penalty, part_rewards, verifier_reward
from megatron_eqlen.sampling.equal_length.dual_track import pairs_of, tail_of
from megatron_eqlen.types import Rollout


def pair_rewards(
    stream: Rollout,
    reduce: Literal["max", "mean"] = "max",
    unfinished: Literal["zero", "drop"] = "zero",
    penalty: Penalty = no_penalty,
) -> list[tuple[float, float] | None]:
    """Return ``(reward of A_i, reward of B_i)`` for each pair of a scored, complete stream.

    A B_i that no ended response extends has reward 0 and the penalty of the trunk, as long as it got
    (``zero``), or its pair is left out (``drop``: None).
    """
    trunk_penalty, truncated = _open_end(stream, penalty)
    known = [trunk_penalty] if truncated and penalty is not no_penalty else []
    rewards: list[tuple[float, float] | None] = []
    for a, ended in _from_last(stream, penalty):
        if ended:
            values = ended + known
            rewards.append((a, max(values) if reduce == "max" else sum(values) / len(values)))
        else:
            rewards.append(None if unfinished == "drop" else (a, trunk_penalty))
    return rewards[::-1]


def reductions(stream: Rollout, unfinished: Literal["zero", "drop"]) -> list[tuple[float, float]]:
    """Return maximum and mean for each B_i of ``pair_rewards``, without penalties, the last first."""
    return [
        (max(ended), sum(ended) / len(ended)) if ended else (0.0, 0.0)
        for _, ended in _from_last(stream, no_penalty)
        if ended or unfinished == "zero"
    ]


def _from_last(stream: Rollout, penalty: Penalty) -> Iterator[tuple[float, list[float]]]:
    """Yield the reward of A_i and those of all responses that extend B_i, from the last pair on; the list
    grows."""
    own, tail = _own_rewards(stream, penalty), tail_of(stream)
    ended = [own[tail.number]] if tail is not None and tail.number in own else []
    for pair in reversed(pairs_of(stream)):
        if pair.b.number in own:
            ended.append(own[pair.b.number])
        yield own[pair.a.number], ended
        ended.append(own[pair.a.number])


def policy_rewards(stream: Rollout, penalty: Penalty = no_penalty) -> dict[int, float]:
    """Return the value of each part of a scored, complete stream, by its number: an unbiased estimate of the
    expected reward of responses that extend it. An end that the budget left open counts as a failure."""
    return part_rewards(stream, penalty, open_reward=0.0)


def _open_end(stream: Rollout, penalty: Penalty) -> tuple[float, bool]:
    """Return the penalty of the whole trunk, and True if it reached the limit; (0, False) where it ended."""
    trunk = [part for part in stream.parts if part.role != "a"]
    if not trunk or trunk[-1].finish_reason == "stop":
        return 0.0, False
    truncated = stream.outcome == "truncated" or trunk[-1].finish_reason == "length"
    return penalty(sum(map(len, trunk)), "length" if truncated else None), truncated


def _own_rewards(stream: Rollout, penalty: Penalty) -> dict[int, float]:
    """Return the reward of each response, by the number of the part that ends it."""
    ends = stream.ends()
    return {
        part.number: verifier_reward(part, stream.prompt_id) + penalty(ends[part.number], "stop")
        for part in stream.parts
        if part.finish_reason == "stop"
    }
