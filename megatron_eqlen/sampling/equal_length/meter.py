"""Metrics of streams and their pairs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import Literal, get_args

from megatron_eqlen.metrics import (
    HARVEST_PAIRS_PER_STREAM,
    HARVEST_SEGMENT_LENGTH,
    HARVEST_SUPERVISED_TOKENS,
    OBJECTIVE_PAIRS_PER_STREAM,
    OBJECTIVE_REWARD_GAP,
    OBJECTIVE_SEGMENT_LENGTH_MEAN,
    OBJECTIVE_SKIP_RATE,
)
from megatron_eqlen.recipe import Recipe
from megatron_eqlen.sampling.comparison import ComparisonUnit, all_equal, graded
from megatron_eqlen.sampling.context import seen
from megatron_eqlen.sampling.equal_length.suffix import pair_rewards
from megatron_eqlen.sampling.kind import Draw
from megatron_eqlen.types import Metrics, Outcome, Segment, Stream


def shape(streams: Sequence[Stream]) -> Metrics:
    """Pairs, their lengths, and why the streams ended."""
    lengths = [len(pair.a) for stream in streams for pair in stream.pairs]
    outcomes = Counter(stream.outcome for stream in streams)
    metrics: Metrics = {
        "harvest/streams": len(streams),
        "harvest/pairs": len(lengths),
        HARVEST_PAIRS_PER_STREAM: len(lengths) / len(streams),
        HARVEST_SUPERVISED_TOKENS: 2 * sum(lengths),
        "harvest/tail_tokens": sum(len(stream.tail) for stream in streams if stream.tail is not None),
    }
    for outcome in get_args(Outcome):
        metrics[f"harvest/{outcome}_fraction"] = outcomes[outcome] / len(streams)
    if lengths:
        metrics[HARVEST_SEGMENT_LENGTH] = fmean(lengths)
        metrics["harvest/segment_length_max"] = max(lengths)
    return metrics | seen(streams, _starts, branches=sum(max(len(one.pairs) - 1, 0) for one in streams))


def draws(stream: Stream) -> Iterator[Draw]:
    """At each fork two tracks continue the same trunk, independently. The longer one's rest is estimated by
    what follows its B, so A_i counts as half of what there is from its fork on: 1 / 2^i. The plain mean over
    the responses of a stream is of longer ones: each B side was chosen because it went on."""
    weight, start = 1.0, 0
    for pair in stream.pairs:
        weight /= 2
        yield _draw(stream, weight, start, pair.a)
        start += len(pair.b)
    if stream.tail is not None:
        yield _draw(stream, weight, start, stream.tail)
    elif stream.pairs:
        last = stream.pairs[-1].b
        yield _draw(stream, weight, start - len(last), last)


def _draw(stream: Stream, weight: float, start: int, segment: Segment) -> Draw:
    reward = graded(segment, stream.prompt_id) if segment.finish_reason == "stop" else 0.0
    return Draw(weight, start + len(segment), reward)


def _starts(stream: Stream) -> Iterator[int]:
    trunk = 0
    for pair in stream.pairs:
        yield from (trunk, trunk)
        trunk += len(pair.b)
    if stream.tail is not None:
        yield trunk


def compared(units: Sequence[ComparisonUnit], streams: Sequence[Stream], recipe: Recipe) -> Metrics:
    """Pairs with rewards: how many, how long, how many have equal rewards (and are not trained). Empty for no
    streams."""
    if not streams:
        return {}
    lengths = [unit.lengths[0] for unit in units]
    return {
        "objective/pairs": float(len(units)),
        OBJECTIVE_PAIRS_PER_STREAM: len(units) / len(streams),
        OBJECTIVE_SKIP_RATE: fmean(all_equal(unit.rewards) for unit in units) if units else 0.0,
        OBJECTIVE_REWARD_GAP: _reward_gap(streams, recipe),
        OBJECTIVE_SEGMENT_LENGTH_MEAN: fmean(lengths) if lengths else 0.0,
        "objective/segment_length_max": float(max(lengths, default=0)),
    }


def _reward_gap(streams: Sequence[Stream], recipe: Recipe) -> float:
    """How much higher the suffix reward ``max`` is than ``mean``, on average over the B sides of streams that
    are complete."""
    streams = [stream for stream in streams if not stream.suspended]
    best, mean = (_b_rewards(streams, reduce, recipe) for reduce in ("max", "mean"))
    return fmean(best) - fmean(mean) if best else 0.0


def _b_rewards(streams: Sequence[Stream], reduce: Literal["max", "mean"], recipe: Recipe) -> list[float]:
    rewards = [pair_rewards(stream, reduce, recipe.equal_length.unfinished) for stream in streams]
    return [pair[1] for pairs in rewards for pair in pairs if pair]
