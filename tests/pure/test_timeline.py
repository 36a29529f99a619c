"""Idle times, from spans that overlap, are still open, or lie outside the step; and their picture."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_eqlen.processes.timeline import ENGINE, TRAINER, Timeline, TimeSpan
from megatron_eqlen.report.charts import LANES, STAGES, stage_colour, timeline
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
        covered = {
            moment
            for span in line.spans
            if span.stage in stages
            for moment in range(since, since + length)
            if span.began <= moment < span.ended
        }
        assert line.idle(stages, since, since + length) == length - len(covered)


def test_a_stage_that_raises_has_ended_too():
    line = Timeline()
    with pytest.raises(KeyError), line.span("train"):
        raise KeyError
    assert line.spans[0].ended < float("inf")


def test_the_picture_has_a_bar_for_each_stage_in_its_lane():
    spans = [{"stage": stage, "began": 100.0 + n, "ended": 101.0 + n} for n, stage in enumerate(STAGES)]
    spans[-1]["track"] = "q1/0/2"
    records = [{"step": 1, "time": 104.0, "spans": spans[:4]}, {"step": 2, "time": 107.0, "spans": spans[4:]}]
    (chart,) = timeline([{"step": 0, "time": 99.0, "spans": []}, *records])
    assert [(one.name, one.last) for one in chart.series] == [(stage, "1 s") for stage in STAGES]
    lanes = {stage: lane for lane, stages in LANES.items() for stage in stages}
    data = chart.data()
    assert data["spans"] == [
        [lanes[stage], stage, float(n), n + 1.0, stage_colour(stage), "q1/0/2" * (stage == STAGES[-1])]
        for n, stage in enumerate(STAGES)
    ]
    assert data["lanes"] == [*LANES][::-1]
    assert (data["x"], data["clock"]) == ([4.0, 7.0], ["step 1", "step 2"])
    assert timeline([{"step": 1, "time": 1.0, "spans": []}]) == []
