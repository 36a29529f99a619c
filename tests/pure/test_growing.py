"""A harvest in progress, read from the tokens of its tracks."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from megatron_eqlen.report.growing import grow
from megatron_eqlen.sampling import KINDS
from megatron_eqlen.types import Delta
from tests.kit.report_runs import prompt, recipe


@given(st.data())
def test_what_a_journal_holds_of_a_harvest_is_what_the_harvest_had(data):
    """The comparison covers every kind of sampling, at any moment."""
    sampling = data.draw(st.sampled_from(sorted(KINDS)))
    of_trees = {"tree_sampling": {"branching": 2, "depth": 2}} if sampling == "tree" else {}
    objective = "treerpo" if sampling == "tree" else "grpo"
    made = recipe(
        Path("m"), sampling=sampling, objective=objective, rollout={"max_response_length": 6}, **of_trees
    )
    (first, *_), (again, *_) = (
        KINDS[sampling].harvesters([prompt(1)], made, frozenset({9}), 0) for _ in range(2)
    )
    tracks = {track.name: track for track in first.start()}
    for _ in range(data.draw(st.integers(0, 20))):
        track = tracks[data.draw(st.sampled_from(sorted(tracks)))]
        if first.complete or track.finish_reason is not None:
            continue
        token = data.draw(st.sampled_from([5, 6, 9]))
        track.extend(Delta("", [token], {"logprobs": [-1.0]}), 0)
        while launched := first.advance():
            tracks |= {track.name: track for track in launched}
    grow(again, {(track.prompt_id, track.index, track.number): track.token_ids for track in tracks.values()})
    assert state_of(again) == state_of(first)
    if not again.complete:
        parts = sum(len(part.segment) for part in again.parts)
        opened = sum(len(track) - start for track, start in again.open_tracks())
        assert parts + opened == sum(map(len, tracks.values())), "a token is a part's or an open track's"


def state_of(harvester) -> tuple:
    parts = [
        (part.role, part.number, part.parent, part.segment.token_ids.tolist()) for part in harvester.parts
    ]
    opened = [(track.name, list(track.token_ids), start) for track, start in harvester.open_tracks()]
    return harvester.complete, sorted(parts), [] if harvester.complete else sorted(opened)
