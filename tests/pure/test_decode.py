"""A page decodes as training does."""

from __future__ import annotations

import json
from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_eqlen.hf.tokenizer import load_decoder, load_tokenizer
from tests.kit.sentencepiece_maker import write_sentencepiece_tokenizer
from tools.tokenizer_maker import write_hf_tokenizer

TEXT = [r"So \boxed{5} and ```python print(1) ``` 漢字 é 🙂 </think> or \fbox{x} " * 9]
BITS = ("</think>", "<think>", "<|im_end|>", "<|endoftext|>", " ", "\n", "x", "é", "漢", "🙂")


@pytest.fixture(scope="module", params=[write_hf_tokenizer, write_sentencepiece_tokenizer])
def tokenizer(request, tmp_path_factory):
    """Return a tokenizer: byte-level BPE, or SentencePiece with bytes for what it does not know."""
    folder = tmp_path_factory.mktemp("tokenizer")
    request.param(folder, TEXT, vocab_size=340)
    return load_tokenizer(folder)


@given(data=st.data())
@settings(deadline=None)
def test_pages_decode_as_the_tokenizer_does(tokenizer, data):
    """Pages read tokenizer.json without Transformers."""
    whole = [tokenizer.encode(bit) for bit in BITS]
    anything = st.integers(0, tokenizer.vocab_size - 1).map(lambda token: [token])
    ids = [*chain.from_iterable(data.draw(st.lists(st.sampled_from(whole) | anything, max_size=60)))]
    assert load_decoder(tokenizer.folder)(ids) == tokenizer.decode(ids)


def test_special_tokens_may_stand_in_a_file_of_their_own(tmp_path):
    """Folders of Transformers before 4.34 have them in special_tokens_map.json."""
    write_hf_tokenizer(tmp_path, TEXT, vocab_size=340)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    tokens = {key: config.pop(key) for key in ("eos_token", "pad_token")}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(tokens))
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    tokenizer = load_tokenizer(tmp_path)
    ids = [*tokenizer.encode("x"), *tokenizer.eos_token_ids]
    assert load_decoder(tmp_path)(ids) == tokenizer.decode(ids) == "x"
