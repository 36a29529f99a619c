"""Rewards of a stream's pairs: the verifier's grade of A_i, and a reduction over the responses that extend
B_i.

A_i ended, so its reward is its own grade. B_i joined the trunk; its reward is taken from every ended response
that extends it: A_{i+1}, A_{i+2}, ..., a last B_N that ended together with A_N, and an ended tail. The paper
takes their maximum; the mean is its ablation. A both-ended B_N is a response itself: its reward is its
own grade.

A length penalty is added to each response before they are reduced. A trunk that reached the limit then is a
response as well, with reward 0 and the full penalty, and counts in the mean (nothing is less, so no maximum
needs it). Otherwise B_i would escape a penalty that the shorter A_i pays.

A stream that is suspended has no final reward of its newest B. The maximum over extensions is final once it
is 1, a grader's highest; the mean once the stream is complete.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Literal

from megatron_eqlen.sampling.comparison import Penalty, no_penalty, verifier_reward
from megatron_eqlen.types import Pair, Segment, Stream

BEST = 1.0
"""The highest reward. A length penalty does not rise with length, and responses that may yet extend a B side
are longer than those that have ended on its path: none can have a higher reward than a response with this
one."""


def pair_rewards(
    stream: Stream,
    reduce: Literal["max", "mean"] = "max",
    unfinished: Literal["zero", "drop"] = "zero",
    penalty: Penalty = no_penalty,
) -> list[tuple[float, float] | None]:
    """Return ``(reward of A_i, reward of B_i)`` for each pair of a scored stream.

    A B_i that no ended response extends has reward 0 and the penalty of the trunk, as long as it got
    (``zero``), or its pair is left out (``drop``: None).
    """
    starts = list(accumulate((len(pair.b) for pair in stream.pairs), initial=0))
    trunk_penalty, truncated = _open_end(stream, penalty)
    known = [trunk_penalty] if truncated and penalty is not no_penalty else []
    ended: list[float] = []
    if stream.tail is not None and stream.tail.finish_reason == "stop":
        ended.append(_reward(stream, stream.tail, starts[-1], penalty))
    rewards: list[tuple[float, float] | None] = []
    for pair, start in zip(reversed(stream.pairs), reversed(starts[:-1]), strict=True):
        if pair.b.finish_reason == "stop":
            ended.append(_reward(stream, pair.b, start, penalty))
        a = _reward(stream, pair.a, start, penalty)
        if ended:
            rewards.append((a, _reduce(ended + known, reduce)))
        else:
            rewards.append(None if unfinished == "drop" else (a, trunk_penalty))
        ended.append(a)
    return rewards[::-1]


def policy_rewards(stream: Stream, penalty: Penalty = no_penalty) -> list[tuple[float, float]]:
    """Return ``(reward of A_i, value of B_i)`` for each pair of a scored, complete stream.

    The value is an unbiased estimate of the expected reward of responses that extend B_i. Two tracks continue
    the trunk: A_{i+1} is half of them, and what extends B_{i+1} estimates the other half. So the value is the
    sum of 2^-j r(A_{i+j}), plus the remaining weight times the reward of the end of the trunk: that of a
    both-ended B_N or of the tail, and 0 (with the full length penalty) where the trunk reached the limit.
    """
    starts = list(accumulate((len(pair.b) for pair in stream.pairs), initial=0))
    value = trunk_reward(stream, penalty)
    rewards: list[tuple[float, float]] = []
    for pair, start in zip(reversed(stream.pairs), reversed(starts[:-1]), strict=True):
        if pair.b.finish_reason == "stop":
            value = _reward(stream, pair.b, start, penalty)
        a = _reward(stream, pair.a, start, penalty)
        rewards.append((a, value))
        value = (a + value) / 2
    return rewards[::-1]


def trunk_reward(stream: Stream, penalty: Penalty) -> float:
    """Return the reward of the response that trunk and tail make, where the last B side did not end."""
    if stream.tail is not None and stream.tail.finish_reason == "stop":
        return _reward(stream, stream.tail, sum(len(pair.b) for pair in stream.pairs), penalty)
    return _open_end(stream, penalty)[0]


def due_pairs(stream: Stream, reduce: Literal["max", "mean"]) -> range:
    """Return the pairs whose rewards became final in this step. They are consecutive: a response that extends
    a B side extends those before it, too."""
    name = f"{stream.prompt_id}/{stream.index}"
    before = _final(name, [pair for pair in stream.pairs if pair.a.carried], reduce)
    return range(before, _final(name, stream.pairs, reduce) if stream.suspended else len(stream.pairs))


def _final(name: str, pairs: Sequence[Pair], reduce: Literal["max", "mean"]) -> int:
    """Return the number of leading pairs of a suspended stream whose rewards are final: an A side with the
    best reward extends their B sides.

    Raises ValueError for a reward above ``BEST``, which would change rewards that were taken for final.
    """
    if reduce == "mean":
        return 0
    for pair in pairs:
        if pair.a.grade and pair.a.grade.reward > BEST:
            raise ValueError(
                f"stream {name}: expected rewards of at most {BEST:g}, found {pair.a.grade.reward:g}: with "
                f"rollout.carry_over, equal_length.suffix_reward: max takes {BEST:g} for a grader's highest"
            )
    return max((i for i, pair in enumerate(pairs) if pair.a.grade and pair.a.grade.reward >= BEST), default=0)


def _open_end(stream: Stream, penalty: Penalty) -> tuple[float, bool]:
    """Return the penalty of the whole trunk, and True if it reached the limit; (0, False) where it ended."""
    parts = [*(pair.b for pair in stream.pairs), *([stream.tail] if stream.tail is not None else [])]
    if not parts or parts[-1].finish_reason == "stop":
        return 0.0, False
    truncated = stream.outcome == "truncated" or parts[-1].finish_reason == "length"
    return penalty(sum(map(len, parts)), "length" if truncated else None), truncated


def _reduce(rewards: list[float], reduce: Literal["max", "mean"]) -> float:
    return max(rewards) if reduce == "max" else sum(rewards) / len(rewards)


def _reward(stream: Stream, segment: Segment, start: int, penalty: Penalty) -> float:
    """Return the reward of the response that ends with ``segment``, ``start`` tokens after the prompt."""
    assert segment.finish_reason == "stop", f"{stream.prompt_id}: only ended responses have a reward"
    return verifier_reward(segment, stream.prompt_id) + penalty(start + len(segment), segment.finish_reason)
