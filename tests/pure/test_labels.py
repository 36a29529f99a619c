"""Each token is labelled with the weights that sampled it, however tokens are cut into events."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from megatron_eqlen.rollout.vllm.server.labels import Labels
from megatron_eqlen.types import Delta
from tests.kit.marks import examples


@examples(200)
@given(
    syncs=st.lists(st.integers(0, 30), max_size=4).map(sorted),
    cuts=st.lists(st.integers(0, 30), max_size=8).map(sorted),
    lag=st.integers(0, 6),
)
def test_a_token_is_of_the_weights_in_use_when_it_was_sampled(syncs, cuts, lag):
    """Token t is sampled at time t; weights change at ``syncs``; an event with the tokens up to one of
    ``cuts`` arrives ``lag`` later."""
    labels, version, found = Labels(0), 0, []
    happenings = [(time, 0, None) for time in syncs]
    happenings += [(stop + lag, 1, (start, stop)) for start, stop in pairwise([0, *cuts, 30])]
    for time, _, event in sorted(happenings, key=lambda happening: happening[:2]):
        if event is None:
            version += 1
            labels.sync(time, version)
        else:
            tokens = list(range(*event))
            delta = Delta(
                "r", tokens, {"logprobs": [-1.0] * len(tokens)}, "length" if event[1] == 30 else None, 7
            )
            pieces = labels.label(delta)
            assert [piece.finish_reason for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
            assert sum(piece.num_cached_tokens or 0 for piece in pieces) == 7
            found += [(token, piece.policy_version) for piece in pieces for token in piece.token_ids]
    assert found == [(token, sum(time <= token for time in syncs)) for token in range(30)]
