#!/usr/bin/env python
"""Write multiplications as DeepMath-103K parquet files: OUT/train.parquet and OUT/test.parquet.

    tools/make_calculator.py --out runs/calculator/data

A demonstration either calls the tool ``python`` (docs/agents.md) and copies its answer, or names a product at
once, which a small model can only guess. Some calls have a slip. So a model that imitates them can improve by
calling the tool, and without slips.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path

from megatron_eqlen.processes.failures import run_script

sys.path.insert(0, str(Path(__file__).parents[1]))
from tools.make_search import SOLUTIONS, write_rows
from tools.tokenizer_maker import END_OF_TURN, START_OF_TURN

CALLS, SLIPS = 0.5, 0.25
"""Shares of demonstrations that call the tool, and of calls with a wrong digit."""
NUMBERS = range(11, 100)


def demonstrate(a: int, b: int, rng: random.Random) -> str:
    if rng.random() >= CALLS:
        return f"\\boxed{{{a * b}}}"
    written = rng.choice(NUMBERS) if rng.random() < SLIPS else b
    call = json.dumps({"name": "python", "arguments": {"code": f"{a}*{written}"}})
    turns = f"<tool_call>{call}</tool_call>{END_OF_TURN}\n{START_OF_TURN}tool\n{a * written}{END_OF_TURN}\n"
    return f"{turns}{START_OF_TURN}assistant\n\\boxed{{{a * written}}}"


def make_rows(count: int, seed: int) -> list[dict]:
    """Return ``count`` rows with distinct questions."""
    rng = random.Random(seed)
    factors = rng.sample([(a, b) for a in NUMBERS for b in NUMBERS], count)
    return [
        {
            "question": f"What is ${a}*{b}$?",
            "final_answer": str(a * b),
            "difficulty": 1.0,
            "topic": "Mathematics -> Arithmetic",
            **{f"r1_solution_{n + 1}": demonstrate(a, b, rng) for n in range(SOLUTIONS)},
        }
        for a, b in factors
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for the two files")
    parser.add_argument("--train", type=int, default=4000, help="questions to train on")
    parser.add_argument("--test", type=int, default=256, help="held-out questions")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rows = make_rows(args.train + args.test, args.seed)
    write_rows(args.out / "test.parquet", rows[: args.test])
    write_rows(args.out / "train.parquet", rows[args.test :])


if __name__ == "__main__":
    run_script(main)
