#!/usr/bin/env python
"""Write multiplications as JSON lines: OUT/train.jsonl and OUT/test.jsonl, questions with answers; and
OUT/demonstrations.jsonl, chats that tools/make_tiny_model.py imitates.

    tools/make_calculator.py --out runs/calculator/data

A demonstration either calls the tool ``python`` (docs/agents.md) and copies its answer, or names a product at
once, which a small model can only guess. Some calls have a slip. So a model that imitates them can improve by
calling the tool, and without slips.
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path

from megatron_eqlen.hf.tokenizer import Turn
from megatron_eqlen.processes.failures import run_script

sys.path.insert(0, str(Path(__file__).parents[1]))
from tools.demonstrations import called, write_lines

CALLS, SLIPS = 0.5, 0.25
"""Shares of demonstrations that call the tool, and of calls with a wrong digit."""
DEMONSTRATIONS = 3
"""Number for each question to train on."""
NUMBERS = range(11, 100)


def question(a: int, b: int) -> str:
    return f"What is ${a}*{b}$?"


def demonstrate(a: int, b: int, rng: random.Random) -> list[Turn]:
    asked: Turn = {"role": "user", "content": question(a, b)}
    if rng.random() >= CALLS:
        return [asked, _boxed(a * b)]
    written = rng.choice(NUMBERS) if rng.random() < SLIPS else b
    call = called("python", {"code": f"{a}*{written}"}, str(a * written))
    return [asked, *call, _boxed(a * written)]


def _boxed(number: int) -> Turn:
    return {"role": "assistant", "content": f"\\boxed{{{number}}}"}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for the files")
    parser.add_argument("--train", type=int, default=4000, help="questions to train on")
    parser.add_argument("--test", type=int, default=256, help="held-out questions")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if min(args.train, args.test) < 1:
        parser.error(f"--train and --test: expected numbers from 1 on, found {args.train} and {args.test}")
    rng = random.Random(args.seed)
    factors = rng.sample([(a, b) for a in NUMBERS for b in NUMBERS], args.train + args.test)
    for name, pairs in (("test", factors[: args.test]), ("train", factors[args.test :])):
        rows = [{"question": question(a, b), "answer": str(a * b)} for a, b in pairs]
        write_lines(args.out / f"{name}.jsonl", rows)
    chats = [demonstrate(*pair, rng) for pair in factors[args.test :] for _ in range(DEMONSTRATIONS)]
    write_lines(args.out / "demonstrations.jsonl", [{"messages": chat} for chat in chats])


if __name__ == "__main__":
    run_script(main)
