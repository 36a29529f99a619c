"""Decoding only the text that a grader reads: the same text and verdict as for the whole response."""

from __future__ import annotations

import sys
from itertools import chain

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_eqlen.hf import tokenizer as hf_tokenizer
from megatron_eqlen.hf.tokenizer import load_decoder, load_tokenizer
from megatron_eqlen.rewards.code import grader as code
from megatron_eqlen.rewards.code.grader import extract_program
from megatron_eqlen.rewards.grader import END_OF_THINKING, answer_section
from megatron_eqlen.rewards.math import grader as math
from megatron_eqlen.rewards.math.grader import extract_answer
from tests.kit.sentencepiece_maker import write_sentencepiece_tokenizer
from tools.tokenizer_maker import write_hf_tokenizer

TEXT = [r"So \boxed{5} and ```python print(1) ``` 漢字 é 🙂 </think> or \fbox{x} " * 9]
BITS = [
    *("</think>", "</thi", "nk>", "<think>", "<|im_end|>", "<|endoftext|>", " ", "\n", "x", "é", "漢", "🙂"),
    *(
        r"\boxed{",
        r"\boxed",
        r"\boxed{}",
        r"\boxed{ }",
        r"\boxed{5}",
        r"\boxed{1}, \boxed{5}",
        r"\}",
        "{",
        "}",
    ),
    *("```python\n", "\n```\n", "```", "\n~~~~\n", "\n````\n", "print(1)\n"),
]


@pytest.fixture(scope="module", params=["bytes", "pieces"])
def tokenizer(request, tmp_path_factory):
    """Return a tokenizer: byte-level BPE, or SentencePiece with bytes for what it does not know."""
    folder = tmp_path_factory.mktemp("tokenizer")
    write = {"bytes": write_hf_tokenizer, "pieces": write_sentencepiece_tokenizer}[request.param]
    write(folder, TEXT, vocab_size=340)
    return load_tokenizer(folder)


def responses(tokenizer):
    """Return token ids of the bits in any order, with any tokens between them, which cut characters in
    two."""
    whole = [tokenizer.encode(bit) for bit in BITS]
    anything = st.integers(0, tokenizer.vocab_size - 1).map(lambda token: [token])
    return st.lists(st.sampled_from(whole) | anything, max_size=60).map(
        lambda lists: list(chain.from_iterable(lists))
    )


@given(data=st.data())
@settings(deadline=None)
def test_an_end_is_the_end_of_the_whole_text(tokenizer, data):
    ids = data.draw(responses(tokenizer))
    longest = data.draw(st.sampled_from([1, 2, 5, 20, 1000, sys.maxsize]))
    end = read_end(tokenizer, ids, longest, data)
    assert end == answer_section(tokenizer.decode(ids), longest)
    assert end == tokenizer.decode(ids).rpartition("</think>")[2][-longest:]


@given(data=st.data())
@settings(deadline=None)
def test_a_grader_sees_in_the_end_what_it_sees_in_the_whole_text(tokenizer, data):
    ids = data.draw(responses(tokenizer))
    longest = data.draw(st.sampled_from([3, 8, 20, 50, 1000]))
    whole, end = tokenizer.decode(ids), read_end(tokenizer, ids, longest, data)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(math, "LONGEST_TAIL", longest)
        patch.setattr(code, "LONGEST_SECTION", longest)
        for look in (extract_answer, extract_program):
            assert look(end) == look(whole)


def read_end(tokenizer, ids: list[int], longest: int, data) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hf_tokenizer, "FIRST_READ", data.draw(st.integers(1, 60)))
        return tokenizer.decode_end(np.array(ids, np.int32), END_OF_THINKING, longest)


def test_after_the_thinking_no_more_is_decoded_than_needed(tokenizer, monkeypatch):
    decoded, decode = [], tokenizer._decode
    monkeypatch.setattr(tokenizer, "_decode", lambda ids: decoded.append(len(ids)) or decode(ids))
    response = tokenizer.encode("so 5 or " * 20_000 + r"</think> \boxed{5}")
    assert tokenizer.decode_end(np.array(response), END_OF_THINKING, 32_768).strip() == r"\boxed{5}"
    assert sum(decoded) == hf_tokenizer.FIRST_READ


@given(data=st.data())
@settings(deadline=None)
def test_pages_decode_as_the_tokenizer_does(tokenizer, data):
    """Pages read tokenizer.json without Transformers."""
    ids = data.draw(responses(tokenizer))
    assert load_decoder(tokenizer.folder)(ids) == tokenizer.decode(ids)
