#!/usr/bin/env python
"""Check and normalise downloaded data into one parquet file, ready for ``reader: prepared``.

    tools/prepare_data.py --reader deepmath --path DeepMath-103K/data --out data/deepmath.parquet
    tools/prepare_data.py --reader recipes.opencodereasoning:read --path data/opencodereasoning --out FILE

Left out and counted by reason: rows with missing or wrong fields, duplicates, what the filters exclude,
golds that cannot be graded against, problems without tests. The file holds the counts, too.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import batched
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.logging import RichHandler
from rich.progress import Progress, TextColumn, TimeElapsedColumn

from megatron_eqlen.data.prepared import prepared_file
from megatron_eqlen.data.prompts import chat_messages
from megatron_eqlen.data.rows import Problem, Tally
from megatron_eqlen.data.sources import read_source
from megatron_eqlen.graders.math.grader import MathGrader
from megatron_eqlen.hf.tokenizer import Tokenizer, load_tokenizer
from megatron_eqlen.processes.failures import run_script
from megatron_eqlen.recipe import SourceRecipe
from megatron_eqlen.recipe.load import explain

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
    instruction) are left out. Raises ValueError if no row is kept. Everything streams: a few hundred rows are
    in memory, and of each question kept 16 bytes to find duplicates."""
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


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--reader", required=True, help="deepmath, jsonl, or package.module:read")
    parser.add_argument("--path", required=True, help="a file, or the folder of the data set's files")
    parser.add_argument("--out", required=True, type=Path, help="parquet file to write")
    parser.add_argument("--min-difficulty", type=float)
    parser.add_argument("--max-difficulty", type=float)
    parser.add_argument("--exclude", help="questions to leave out, one a line (decontamination)")
    parser.add_argument("--tokenizer", help="model folder; measures questions for --max-prompt-length")
    parser.add_argument("--max-prompt-length", type=int, help="tokens (default: 2048); needs --tokenizer")
    parser.add_argument("--workers", type=int, default=2, help="processes that check gold answers")
    args = parser.parse_args()
    if args.workers < 1:
        parser.error(f"--workers: expected a number from 1 on, found {args.workers}")
    if args.max_prompt_length is None:
        args.max_prompt_length = 2048
    elif args.max_prompt_length < 1 or not args.tokenizer:
        parser.error("--max-prompt-length: expected a number from 1 on, and --tokenizer, which measures")
    return args


def main() -> None:
    args = parse_arguments()
    console = Console(stderr=True)
    logging.basicConfig(level=logging.WARNING, format="%(message)s", handlers=[RichHandler(console=console)])
    recipe_keys = ("reader", "path", "min_difficulty", "max_difficulty", "exclude")
    try:
        source = SourceRecipe(name="prepared", **{key: getattr(args, key) for key in recipe_keys})
    except ValueError as error:
        raise SystemExit(f"error: {explain(error, SourceRecipe)}") from None
    tokenizer = load_tokenizer(args.tokenizer) if args.tokenizer else None
    args.out.parent.mkdir(parents=True, exist_ok=True)
    grader = MathGrader(args.workers, timeout=30.0)
    with Progress(TextColumn("{task.description}"), TimeElapsedColumn(), console=console) as bar:
        task = bar.add_task("reading", total=None)

        def show(tally: Tally) -> None:
            left_out = tally.dropped.total()
            bar.update(task, description=f"{tally.kept:,} rows kept, {left_out:,} left out")

        try:
            manifest = prepare(source, args.out, grader, tokenizer, args.max_prompt_length, show)
        except ValueError as error:
            raise SystemExit(f"error: {error}") from None
        finally:
            grader.close()
    for reason, count in manifest["dropped"].items():
        print(f"left out: {reason} {count:,}")
    print(f"{manifest['rows']:,} rows kept; {args.out} is written")


if __name__ == "__main__":
    run_script(main)
