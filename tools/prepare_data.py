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
from pathlib import Path

from rich.console import Console
from rich.logging import RichHandler
from rich.progress import Progress, TextColumn, TimeElapsedColumn

from megatron_eqlen.data.prepare import prepare
from megatron_eqlen.data.rows import Tally
from megatron_eqlen.graders.math.grader import MathGrader
from megatron_eqlen.hf.tokenizer import load_tokenizer
from megatron_eqlen.processes.failures import run_script
from megatron_eqlen.recipe import SourceRecipe
from megatron_eqlen.recipe.load import explain


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
