"""Rewards of a stream's pairs: the verifier's word on A_i, a reduction over what extends B_i.

A_i ended, so its reward is its own grade. B_i joined the trunk, and every ended response that extends it
speaks for it: A_{i+1}, A_{i+2}, ..., a last B_N that ended together with A_N, and an ended tail. The paper
takes their maximum; the mean is its ablation. A both-ended B_N is a response itself: its reward is its
own grade.
"""

from __future__ import annotations

from typing import Literal

from megatron_eqlen.types import Segment, Stream


def pair_rewards(
    stream: Stream,
    reduce: Literal["max", "mean"] = "max",
    unfinished: Literal["zero", "drop"] = "zero",
) -> list[tuple[float, float] | None]:
    """``(reward of A_i, reward of B_i)`` for each pair of a scored stream.

    A B_i that no ended response extends has reward 0 (``zero``), or its pair is left out (``drop``: None).
    """
    extensions: list[float] = []
    if stream.tail is not None and stream.tail.finish_reason == "stop":
        extensions.append(_reward(stream, stream.tail))
    rewards: list[tuple[float, float] | None] = []
    for pair in reversed(stream.pairs):
        if pair.b.finish_reason == "stop":
            extensions.append(_reward(stream, pair.b))
        a = _reward(stream, pair.a)
        b = _reduce(extensions, reduce)
        rewards.append(None if b is None and unfinished == "drop" else (a, b or 0.0))
        extensions.append(a)
    return rewards[::-1]


def _reduce(rewards: list[float], reduce: Literal["max", "mean"]) -> float | None:
    if not rewards:
        return None
    return max(rewards) if reduce == "max" else sum(rewards) / len(rewards)


def _reward(stream: Stream, segment: Segment) -> float:
    assert segment.finish_reason == "stop", f"{stream.prompt_id}: only ended responses have a reward"
    assert segment.grade is not None, f"{stream.prompt_id}: stream {stream.index} is not scored yet"
    return segment.grade.reward
