"""Checking and normalising a folder of downloaded files into one prepared file.

    files ──reader──► rows ──filter──► gold checked, prompt measured ──► OUT.parquet, with its manifest

Everything streams: a few hundred rows are in memory, and of each question kept 16 bytes to find duplicates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import batched
from pathlib import Path
from typing import Any

from megatron_eqlen.data.prepared import prepared_file
from megatron_eqlen.data.prompts import chat_messages
from megatron_eqlen.data.rows import Problem, Tally
from megatron_eqlen.data.sources import read_source
from megatron_eqlen.graders.math.grader import MathGrader
from megatron_eqlen.hf.tokenizer import Tokenizer
from megatron_eqlen.recipe import SourceRecipe

CHUNK = 256
"""Rows whose golds are checked together."""
PROBE = "What is 1 + 1?"
"""Probe text: tokenizers that split it differently are different tokenizers."""


def prepare(
    source: SourceRecipe,
    out: Path,
    grader: MathGrader,
    tokenizer: Tokenizer | None = None,
    max_prompt_length: int | None = None,
    progress: Callable[[Tally], None] = lambda _: None,
) -> dict[str, Any]:
    """Write ``out``, which appears when it is complete, and return its manifest. ``progress`` is called after
    every chunk. With ``tokenizer``, questions of more than ``max_prompt_length`` tokens (without an
    instruction) are left out. Raises ValueError if no row is kept."""
    limit = max_prompt_length if tokenizer else None
    tally = Tally()
    manifest: dict[str, Any] = {
        "source": source.model_dump(mode="json", exclude={"name", "weight"}),
        "max_prompt_length": limit,
        "tokenizer": tokenizer.encode(tokenizer.render_chat(chat_messages(PROBE))) if tokenizer else None,
        "grader": grader.name,
    }
    with prepared_file(out, manifest) as write:
        # a chunk at a time, so that golds are checked in parallel
        for chunk in batched(read_source(source, tally), CHUNK):
            for row, refusal in zip(chunk, check_rows(chunk, grader, tokenizer, limit), strict=True):
                if refusal is None:
                    write(replace(row, gold_checked=True))
                    tally.kept += 1
                else:
                    tally.drop(row.row_id, *refusal)
            progress(tally)
        if not tally.kept:
            raise ValueError(f"{source.path}: no usable row: {tally.summary(0)}")
        manifest |= {"rows": tally.kept, "dropped": dict(sorted(tally.dropped.items()))}
    return manifest


def check_rows(
    rows: Sequence[Problem], grader: MathGrader, tokenizer: Tokenizer | None, limit: int | None
) -> list[tuple[str, str] | None]:
    """Return None for each row, or (reason to leave it out, what was found): by length, then gold."""
    refusals: list[tuple[str, str] | None] = []
    for row in rows:
        turns = [*row.messages] if row.messages else chat_messages(row.question)
        length = len(tokenizer.encode(tokenizer.render_chat(turns))) if tokenizer and limit else 0
        refusals.append(("too_long", f"{length} tokens, limit {limit}") if limit and length > limit else None)
    # Rows that are too long need no check of their golds.
    math = [n for n, row in enumerate(rows) if row.grader == "math" and refusals[n] is None]
    for n, reason in zip(math, grader.check_golds([rows[n].gold for n in math]), strict=True):
        refusals[n] = (reason, repr(rows[n].gold[:200])) if reason else None
    return refusals
