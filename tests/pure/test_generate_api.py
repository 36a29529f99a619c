"""Each token has the version of the weights that sampled it, however a server cuts tokens into events."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_eqlen.engines.generate_api import by_version
from megatron_eqlen.types import Delta
from tests.kit.marks import examples

TOKENS = 30


@examples(200)
@given(
    syncs=st.sets(st.integers(1, TOKENS - 1), max_size=4).map(sorted),
    cuts=st.sets(st.integers(1, TOKENS - 1), max_size=8).map(sorted),
)
def test_an_event_is_cut_where_the_weights_change(syncs, cuts):
    """Weights change after ``syncs`` tokens; events end after ``cuts`` tokens."""
    found = []
    for start, end in pairwise([0, *cuts, TOKENS]):
        spans = [
            {"version": str(version), "start": first, "end": min(last, end)}
            for version, (first, last) in enumerate(pairwise([0, *syncs, TOKENS]))
            if first < end
        ]
        tokens = list(range(start, end))
        event = Delta("r", tokens, {"logprobs": [-1.0 * token for token in tokens]})
        event.path, event.finish_reason = {"routes": np.zeros(1)}, "length" if end == TOKENS else None
        pieces = by_version(event, spans, {str(version): version for version in range(5)})
        assert [piece.finish_reason for piece in pieces] == [None] * (len(pieces) - 1) + [event.finish_reason]
        assert [bool(piece.path) for piece in pieces] == [True] + [False] * (len(pieces) - 1)
        found += [
            (token, logprob, piece.policy_version)
            for piece in pieces
            for token, logprob in zip(piece.token_ids, piece.columns["logprobs"], strict=True)
        ]
    assert found == [(token, -token, sum(sync <= token for sync in syncs)) for token in range(TOKENS)]


def test_tokens_of_weights_that_were_not_sent_are_an_error():
    spans = [{"version": "default", "start": 0, "end": 1}]
    with pytest.raises(ConnectionError, match="expected tokens of weights '7', found 'default'"):
        by_version(Delta("r", [5], {"logprobs": [-1.0]}), spans, {"7": 7})


def test_an_end_without_tokens_has_no_version():
    end = Delta("r", [], {"logprobs": []}, "lost")
    assert by_version(end, [], {}) == [end]
