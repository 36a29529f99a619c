"""Tables of tokens: slices join to the whole, whatever the columns; lengths travel without values."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_eqlen.tokens import GrowingTokens, Placeholder, Ragged, Tokens
from tests.kit.marks import examples

NUMBERS = {"logprobs": st.floats(-9, 0, width=32)}


@st.composite
def tables(draw: st.DrawFn, least: int = 0) -> Tokens:
    """Draw a table of 0 to 12 tokens with any of the columns."""
    length = draw(st.integers(least, 12))
    each = {"min_size": length, "max_size": length}
    columns: dict[str, Any] = {
        name: draw(st.lists(numbers, **each)) for name, numbers in NUMBERS.items() if draw(st.booleans())
    }
    columns["versions"] = draw(st.lists(st.integers(0, 2), **each))
    if draw(st.booleans()):
        columns["kept"] = draw(st.lists(st.lists(st.integers(0, 99), max_size=4), **each))
    if draw(st.booleans()):
        columns["routes"] = np.random.default_rng(length).integers(0, 9, (length, 3, 2)).astype(np.uint8)
    return Tokens.of(draw(st.lists(st.integers(0, 99), **each)), **columns)


def test_tokens_that_were_put_into_a_turn_of_the_policy_are_no_answer():
    turns = Tokens.of([1, 2, 3, 4], 0.0, versions=0, given=[(), (0,), (), (-1,)])
    assert turns.is_generated.tolist() == [True, False, True, False]
    assert turns.is_answer.tolist() == [False, True, False, False]


@examples(60)
@given(tables(), st.data())
def test_slices_join_to_the_table_they_were_cut_from(table, data):
    first, second = sorted(data.draw(st.tuples(*[st.integers(0, len(table))] * 2)))
    parts = [table[:first], table[first:second], table[second:]]
    assert Tokens.joined(parts) == table
    assert Tokens.joined([part.bare() for part in parts]).layout == table.layout


@examples(60)
@given(tables(1), st.data())
def test_a_track_that_grows_and_is_cut_has_the_tokens_of_the_table(table, data):
    grown = GrowingTokens()
    grown.extend(table)
    end = data.draw(st.integers(0, len(table)))
    grown.cut(end)
    grown.extend(table[end:])
    assert all(np.array_equal(_flat(grown[:][name]), _flat(table[name])) for name in table.columns)
    start, stop = sorted(data.draw(st.tuples(*[st.integers(0, len(table))] * 2)))
    assert {name: _flat(v).tolist() for name, v in grown[start:stop].columns.items()} == {
        name: _flat(v).tolist() for name, v in table[start:stop].columns.items()
    }


@examples(60)
@given(tables())
def test_a_table_survives_pickling_and_a_bare_one_keeps_its_layout(table):
    assert pickle.loads(pickle.dumps(table)) == table
    bare = table.bare()
    again = pickle.loads(pickle.dumps(bare))
    assert (len(again), again.layout, again.is_bare) == (len(table), table.layout, True)
    assert len(pickle.dumps(bare)) < 400


@examples(60)
@given(tables())
def test_the_arrays_of_a_table_fill_the_room_of_its_bare_one(table):
    room = table.bare().with_room()
    for mine, others in zip(room.arrays(), table.arrays(), strict=True):
        mine[...] = others
    assert room == table


def test_a_table_without_some_of_its_values_keeps_the_others():
    routes = Placeholder((3, 2, 8), "uint8")
    partly = Tokens.of([5, 6, 7], [-1.0, -2.0, -3.0], routes=routes)
    assert not partly.is_bare
    again = pickle.loads(pickle.dumps(partly))
    assert again.token_ids.tolist() == [5, 6, 7]
    assert again["logprobs"].tolist() == [-1.0, -2.0, -3.0]
    assert again["routes"] == routes


def test_tables_whose_lists_are_all_empty_join():
    table = Tokens.of([5, 6], [-1.0, -2.0], kept=[[], []])
    assert Tokens.joined([table[:1], table[1:]]) == table


def test_values_of_another_number_of_tokens_are_refused():
    with pytest.raises(ValueError, match="column logprobs: expected values of 2 tokens, found 3"):
        Tokens.of([1, 2], [-1.0, -1.0, -1.0])
    grown = GrowingTokens()
    grown.append([1], {"logprobs": [-1.0]}, version=0)
    with pytest.raises(ValueError, match="expected logprobs of 2 tokens, found 0"):
        grown.append([1, 2], {}, version=0)
    with pytest.raises(ValueError, match="expected logprobs of each token, found logprobs, kept"):
        grown.append([1], {"logprobs": [-1.0], "kept": [[1]]}, version=0)
    with pytest.raises(ValueError, match="expected at most 255 kept tokens, found 256"):
        GrowingTokens().append([1], {"logprobs": [-1.0], "kept": [range(256)]}, version=0)


def _flat(values: Any) -> np.ndarray:
    return np.concatenate([values.counts, values.values]) if isinstance(values, Ragged) else values
