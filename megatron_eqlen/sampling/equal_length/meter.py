"""The shape of harvested streams, as metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from statistics import fmean
from typing import get_args

from megatron_eqlen.types import Metrics, Outcome, Stream


def shape(streams: Sequence[Stream]) -> Metrics:
    """Pairs, their lengths, and why the streams ended."""
    lengths = [len(pair.a) for stream in streams for pair in stream.pairs]
    outcomes = Counter(stream.outcome for stream in streams)
    metrics: Metrics = {
        "harvest/streams": len(streams),
        "harvest/pairs": len(lengths),
        "harvest/pairs_per_stream": len(lengths) / len(streams),
        "harvest/supervised_tokens": 2 * sum(lengths),
        "harvest/tail_tokens": sum(len(stream.tail) for stream in streams if stream.tail is not None),
    }
    for outcome in get_args(Outcome):
        metrics[f"harvest/{outcome}_fraction"] = outcomes[outcome] / len(streams)
    if lengths:
        metrics["harvest/segment_length"] = fmean(lengths)
        metrics["harvest/segment_length_max"] = max(lengths)
    return metrics
