"""A tokenizer for tiny models, made like Qwen's: digits one by one, Qwen's chat tokens and template."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

END_OF_TEXT, START_OF_TURN, END_OF_TURN = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = (END_OF_TEXT, START_OF_TURN, END_OF_TURN)
THINK_TOKENS = ("<think>", "</think>")
"""Tokens that are added but not special: decoding keeps them, as in Qwen3."""

PRETOKEN = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
"""Split of the text before BPE: words with the sign before them, single digits, runs of signs, white space.
"""

CHAT_TEMPLATE = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}
{{- '<think>\\n\\n</think>\\n\\n' }}
{%- endif %}
{%- endif %}
"""

ROLES = "user\nassistant\nsystem\n"


def write_hf_tokenizer(folder: Path, corpus: Iterable[str], vocab_size: int = 384) -> None:
    """Write tokenizer.json, a byte-level BPE (any text survives a round trip), and its companions (chat
    template, end tokens) into ``folder``.

    ``vocab_size`` bounds the tokens, added ones included: at least 256 bytes and the five added tokens.
    """
    added = len(SPECIAL_TOKENS) + len(THINK_TOKENS)
    if vocab_size < 256 + added:
        raise ValueError(
            f"vocab_size: expected at least 256 bytes + {added} added tokens, found {vocab_size}"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRETOKEN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - added,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([ROLES + text for text in corpus], trainer)
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in THINK_TOKENS])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    write_companions(folder, lambda token: tokenizer.get_vocab()[token])


def write_companions(folder: Path, token_id: Callable[[str], int]) -> None:
    """Write the chat template, and the end-of-sequence set as Qwen3 has it: end of turn and end of text."""
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_OF_TURN,
        "pad_token": END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 4096,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    ends = [token_id(END_OF_TURN), token_id(END_OF_TEXT)]
    generation = {"eos_token_id": ends, "pad_token_id": ends[1], "do_sample": True}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n", encoding="utf-8")
