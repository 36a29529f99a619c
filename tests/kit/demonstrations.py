"""A tokenizer of SmolLM2's shape, rows of chats, and what they make: for the tests of supervised training."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_eqlen.data.demonstrations import training_prompts
from megatron_eqlen.hf.tokenizer import load_tokenizer
from megatron_eqlen.job import Job
from megatron_eqlen.objectives.build import build_minibatches
from megatron_eqlen.recipe import Recipe
from megatron_eqlen.run.demonstrations import demonstrated
from megatron_eqlen.types import Demonstration, TokenTree
from tests.kit.updates import recipe_of
from tools.tokenizer_maker import write_hf_tokenizer

TEMPLATE = """\
{%- for message in messages %}
{%- if loop.first and message.role != 'system' %}
{{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}
{%- endif %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'assistant' %}
{%- generation %}{{- message.content + '<|im_end|>' }}{%- endgeneration %}
{%- else %}
{{- message.content + '<|im_end|>' }}
{%- endif %}
{{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
"""Inserts a system prompt; marks for Transformers what the assistant says."""
CHATS = [
    [("user", "What is 2 + 3?"), ("assistant", "It is 5.")],
    [
        ("system", "Be brief."), ("user", "Hi."), ("assistant", "Hello! <|im_end|> is text here."),
        ("user", "What is 1 + 1?"), ("assistant", "2"),
    ],
    [("user", "Count."), ("assistant", "1 2 3 4 5 6 7 8 9 10 11 12")],
]  # fmt: skip


def messages(chat: Sequence[tuple[str, str]]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in chat]


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer whose configuration names the start of a turn as its end, like that of SmolLM2's
    GGUF, while the generation configuration names the end of a turn."""
    write_hf_tokenizer(folder, [content for chat in CHATS for _, content in chat] * 4, 300)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config |= {"eos_token": "<|im_start|>", "bos_token": "<|im_start|>", "pad_token": None}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    end = load_tokenizer(folder).encode("<|im_end|>")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": end[0]}))


def write_rows(file: Path, rows: Sequence[Any]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def supervised(folder: Path | str, file: Path | str, **changes: Any) -> Recipe:
    """Return a recipe of supervised training on the rows of ``file``, in their order."""
    data = {"sources": [{"name": "rows", "reader": "jsonl", "path": str(file)}], "shuffle": False}
    sections = {"objective": "sft", "data": data, "rollout": {}, "loss": {}}
    return recipe_of(str(folder), sections | {"packing": {"max_tokens_per_row": 120}} | changes)


def drawn(recipe: Recipe, count: int, positions: int = 10_000) -> list[Demonstration]:
    rows = training_prompts(recipe, positions, load_tokenizer(recipe.model.path)).next(count)
    assert all(isinstance(row, Demonstration) for row in rows)
    return rows  # pyright: ignore[reportReturnType]


def minibatches(recipe: Recipe, count: int) -> list[list[TokenTree]]:
    return build_minibatches([demonstrated(row, 0) for row in drawn(recipe, count)], Job(recipe))[0]
