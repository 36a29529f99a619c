"""Small run folders for the report's tests. Question, tokens and pairs are types.py's worked example."""

from __future__ import annotations

import base64
import json
import zlib
from pathlib import Path
from typing import Any

import tests.kit.rollouts as kit
from megatron_eqlen.hf.tokenizer import Tokenizer, load_tokenizer
from megatron_eqlen.job import parse
from megatron_eqlen.recipe import Recipe
from megatron_eqlen.recipe.load import dump
from megatron_eqlen.tokens import Tokens
from megatron_eqlen.types import Grade, Part, Prompt, Rollout
from tools.tokenizer_maker import write_hf_tokenizer

RIGHT, WRONG = Grade(1.0, "correct", "7"), Grade(0.0, "wrong", "<b>8</b>")


def make_tokenizer(folder: Path) -> Tokenizer:
    write_hf_tokenizer(folder, ["seven eight nine ten"], vocab_size=300)
    return load_tokenizer(folder)


def recipe(model: Path, **changes) -> Recipe:
    raw = {
        "name": "tiny", "steps": 20, "group_size": 4, "model": {"path": str(model)},
        "data": {"max_prompt_length": 48, "sources": [{"name": "sums", "path": "sums.parquet"}]},
        "rollout": {"max_response_length": 192},
    }  # fmt: skip
    return parse(raw | changes, "test")


def segment(tokenizer: Tokenizer, text: str, grade: Grade | None = None, stop: bool = False) -> Part:
    tokens = tokenizer.encode(text) + ([min(tokenizer.eos_token_ids)] if stop or grade else [])
    return Part(Tokens.of(tokens, [-0.5] * len(tokens)), "stop" if stop or grade else None, grade)


def prompt(number: int) -> Prompt:
    return Prompt(f"sums/a.parquet#{number}", [1, 2], "What is 3 + 4?", "math", "7", number=number)


def example_stream() -> Rollout:
    """Return ``A_1 = [5, 9]``, ``B_1 = [6, 7]``, ``A_2 = [8, 9]``, ``B_2 = [4, 4]``, tail ``[9]``.

    A_1 is wrong, A_2 right, the tail wrong: B_1's reward is 1 (A_2 extends it), B_2's is 0.
    """
    pairs = [
        (Part(Tokens.of([5, 9], [-1.0, -1.0]), "stop", WRONG), Part(Tokens.of([6, 7], [-1.0, -1.0]))),
        (Part(Tokens.of([8, 9], [-1.0, -1.0]), "stop", RIGHT), Part(Tokens.of([4, 4], [-1.0, -1.0]))),
    ]
    return kit.stream(prompt(1), 0, 3, pairs, "max_pairs", Part(Tokens.of([9], [-1.0]), "stop", WRONG))


def example_group() -> Rollout:
    completions = [
        Part(Tokens.of([5, 9], [-1.0, -1.0]), "stop", RIGHT),
        Part(Tokens.of([6, 7, 8, 9], [-1.0] * 4), "stop", WRONG),
        Part(Tokens.of([4, 4], [-1.0, -1.0]), "length"),
    ]
    return kit.group(prompt(2), 3, completions)


def example_tree() -> Rollout:
    steps = [
        Part(Tokens.of([5, 6], [-1.0] * 2)),
        Part(Tokens.of([9], [-1.0]), "stop", RIGHT),
        Part(Tokens.of([7, 7], [-1.0] * 2), "length"),
    ]
    return kit.tree(prompt(3), 3, steps, [-1, 0, 0])


def write_run(folder: Path, recipe: Recipe, streams: dict[str, list[Rollout]] | None = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "recipe.yaml").write_text(dump(recipe), encoding="utf-8")
    for step, rollouts in (streams or {}).items():
        kit.record(folder / "streams" / step / "rank-0.arrow", rollouts)
    return folder


def unpacked(packed: str) -> dict[str, Any]:
    """Return the question and the parts of a page's rollout."""
    return json.loads(zlib.decompress(base64.b64decode(packed)))
