"""Idle times, from spans that overlap, are still open, or lie outside the step."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_eqlen.processes.timeline import ENGINE, TRAINER, Timeline, TimeSpan
from tests.kit.marks import examples

TIMES = st.integers(0, 20)


@examples(100)
@given(
    spans=st.lists(st.tuples(st.sampled_from(["harvest", "evaluate", "train"]), TIMES, TIMES), max_size=6),
    ongoing=st.none() | TIMES,
    since=TIMES,
    length=st.integers(1, 20),
)
def test_idle_is_the_time_that_no_span_covers(spans, ongoing, since, length):
    line = Timeline()
    line.spans = deque(TimeSpan(stage, min(pair), max(pair)) for stage, *pair in spans)
    if ongoing is not None:
        line.spans.append(TimeSpan("harvest", ongoing))
    for stages in (ENGINE, TRAINER):
        ours = [span for span in line.spans if span.stage in stages]
        moments = range(since, since + length)
        covered = [at for at in moments if any(span.began <= at < span.ended for span in ours)]
        assert line.idle(stages, since, since + length) == length - len(covered)


def test_a_stage_that_raises_has_ended_too():
    line = Timeline()
    with pytest.raises(KeyError), line.span("train"):
        raise KeyError
    assert line.spans[0].ended < float("inf")
