"""Checking and normalising a folder of downloaded files into one prepared file with a manifest.

    files ──reader──► rows ──filter──► gold checked, prompt measured ──► OUT.parquet,
    OUT.parquet.manifest.json

Everything streams: a few hundred rows are in memory at a time, and of each question kept 16 bytes to find
duplicates.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from megatron_eqlen.data.chat import format_prompt
from megatron_eqlen.data.prepared import PreparedWriter, manifest_path, sha256
from megatron_eqlen.data.rows import Row, Tally
from megatron_eqlen.data.sources import read_source
from megatron_eqlen.data.tokenizers import Tokenizer
from megatron_eqlen.recipe import SourceRecipe
from megatron_eqlen.rewards.code_tests import VERSION as CODE_TESTS_VERSION
from megatron_eqlen.rewards.math import MathGrader

CHUNK = 256
"""Rows whose golds are checked together."""


def prepare(
    source: SourceRecipe,
    out: Path,
    grader: MathGrader,
    tokenizer: Tokenizer | None = None,
    max_prompt_length: int | None = None,
    progress: Callable[[Tally], None] = lambda _: None,
) -> dict[str, Any]:
    """Write ``out`` and its manifest; returns the manifest. ``progress`` is told after every chunk.

    With ``tokenizer``, questions of more than ``max_prompt_length`` tokens (without an instruction) are
    left out. Raises ValueError if no row is kept.
    """
    tally = Tally()
    writer = PreparedWriter(out)
    try:
        for chunk in _chunks(_short_enough(read_source(source, tally), tally, tokenizer, max_prompt_length)):
            for row in _with_good_gold(chunk, grader, tally):
                writer.write(row)
                tally.kept += 1
            progress(tally)
        if not tally.kept:
            raise ValueError(f"{source.path}: no usable row: {tally.report()}")
        digest = writer.finish()
    except BaseException:
        writer.abandon()
        raise
    manifest = {
        "sha256": digest,
        "rows": tally.kept,
        "dropped": dict(sorted(tally.dropped.items())),
        "source": source.model_dump(mode="json", exclude={"name", "weight"}),
        "max_prompt_length": max_prompt_length if tokenizer else None,
        "grader": grader.name,
        "tests_checked": CODE_TESTS_VERSION,
        "inputs": input_digests(source),
    }
    manifest_path(out).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    return manifest


def input_digests(source: SourceRecipe) -> dict[str, str]:
    """sha256 of every file the rows may have come from."""
    roots = [Path(root) for root in (source.path, source.tests, source.exclude) if root]
    files = [file for root in roots for file in ([root] if root.is_file() else sorted(root.rglob("*")))]
    return {str(file): sha256(file) for file in files if file.is_file()}


def _chunks(rows: Iterator[Row]) -> Iterator[list[Row]]:
    while chunk := list(islice(rows, CHUNK)):
        yield chunk


def _short_enough(
    rows: Iterable[Row], tally: Tally, tokenizer: Tokenizer | None, limit: int | None
) -> Iterator[Row]:
    for row in rows:
        length = len(format_prompt(tokenizer, row.question)) if tokenizer and limit else 0
        if limit and length > limit:
            tally.drop(row.row_id, "too_long", f"{length} tokens, limit {limit}")
        else:
            yield row


def _with_good_gold(rows: list[Row], grader: MathGrader, tally: Tally) -> Iterator[Row]:
    math = [row for row in rows if row.grader == "math"]
    reasons = dict(
        zip((row.row_id for row in math), grader.check_golds([row.gold for row in math]), strict=True)
    )
    for row in rows:
        if reason := reasons.get(row.row_id):
            tally.drop(row.row_id, reason, repr(row.gold[:200]))
        else:
            yield replace(row, gold_checked=True)
