"""Each token has the version of the weights that sampled it, however a server cuts tokens into events."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_eqlen.engines.generate_api import versions_of
from tests.kit.marks import examples

TOKENS = 30


@examples(200)
@given(
    syncs=st.sets(st.integers(1, TOKENS - 1), max_size=4).map(sorted),
    cuts=st.sets(st.integers(1, TOKENS - 1), max_size=8).map(sorted),
)
def test_each_token_of_an_event_has_the_version_of_its_weights(syncs, cuts):
    """Weights change after ``syncs`` tokens; events end after ``cuts`` tokens."""
    found: list[int] = []
    for start, end in pairwise([0, *cuts, TOKENS]):
        spans = [
            {"version": str(version), "start": first, "end": min(last, end)}
            for version, (first, last) in enumerate(pairwise([0, *syncs, TOKENS]))
            if first < end
        ]
        found += versions_of(spans, end - start, {str(version): version for version in range(5)})
    assert found == [sum(sync <= token for sync in syncs) for token in range(TOKENS)]
    assert versions_of(spans, 0, {}) == versions_of([], 0, {}) == [], "an end without tokens has none"


def test_tokens_of_weights_that_were_not_sent_are_an_error():
    spans = [{"version": "default", "start": 0, "end": 1}]
    with pytest.raises(ConnectionError, match="expected tokens of weights '7', found 'default'"):
        versions_of(spans, 1, {"7": 7})
