"""A SentencePiece tokenizer with the added tokens of ``tools/tokenizer_maker.py``."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable
from pathlib import Path

import sentencepiece
from tokenizers import normalizers
from transformers import AutoTokenizer

from tools.tokenizer_maker import ROLES, SPECIAL_TOKENS, THINK_TOKENS, write_companions


def write_sentencepiece_tokenizer(
    folder: Path, corpus: Iterable[str], vocab_size: int = 384, add_dummy_prefix: bool = False
) -> None:
    """Write tokenizer.model (BPE with byte fallback) and its companions into ``folder``.

    ``vocab_size`` bounds the pieces; a small corpus may fill fewer. The added tokens are user-defined
    symbols, which SentencePiece reads from text.
    """
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([line for text in corpus for line in (ROLES + text).splitlines()]),
        model_writer=model, model_type="bpe", vocab_size=vocab_size, hard_vocab_limit=False,
        byte_fallback=True, split_digits=True, add_dummy_prefix=add_dummy_prefix,
        remove_extra_whitespaces=False, normalization_rule_name="identity",
        user_defined_symbols=[*SPECIAL_TOKENS, *THINK_TOKENS, "\n"], bos_id=-1, eos_id=-1, minloglevel=2,
    )  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.model").write_bytes(model.getvalue())
    pieces = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    write_companions(folder, pieces.piece_to_id)


def write_llama_tokenizer(folder: Path, corpus: Iterable[str], old: bool = False) -> None:
    """Write a tokenizer that begins a text with a space, as Llama 2's; ``old``: also the text behind each
    special token, by the tokenizer.json of the published files."""
    write_sentencepiece_tokenizer(folder, corpus, add_dummy_prefix=True)
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"tokenizer_class": "LlamaTokenizer"}))
    if old:
        backend = AutoTokenizer.from_pretrained(folder).backend_tokenizer
        backend.pre_tokenizer = None
        spaces = [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
        backend.normalizer = normalizers.Sequence(spaces)
        backend.save(str(folder / "tokenizer.json"))
