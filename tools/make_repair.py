#!/usr/bin/env python
"""Write folders to repair, OUT/tasks, and questions about them as DeepMath-103K parquet files.

    tools/make_repair.py --out runs/repair/data

A folder has a program ``sum`` that computes with a wrong sign, and the number ``want`` that it should print.
A demonstration looks at both and changes the sign, or changes it without a look, right half the time;
some take a wrong sign after a look. So a model that imitates them can improve by looking first.
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

LOOKS, SLIPS = 0.5, 0.25
"""Shares of demonstrations that look first, and of those that then take a wrong sign."""
NUMBERS = range(11, 100)
RESULTS = {"+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b}


def turn(command: str, answer: str) -> str:
    """Return a turn that runs ``command``, with the tool's answer and the beginning of the next turn."""
    call = json.dumps({"name": "run", "arguments": {"command": command}})
    said = f"<tool_call>{call}</tool_call>{END_OF_TURN}\n{START_OF_TURN}tool\n{answer}{END_OF_TURN}\n"
    return f"{said}{START_OF_TURN}assistant\n"


def demonstrate(program: str, want: int, signs: tuple[str, str], rng: random.Random) -> str:
    """``signs``: the right one and another that is not in the program."""
    looks = rng.random() < LOOKS
    chosen = signs[rng.random() < (SLIPS if looks else 0.5)]
    seen = turn("cat sum want", f"{program}\n{want}") if looks else ""
    return seen + turn(f"sed -i 's/[-+*]/{chosen}/' sum", "(no output)") + "done"


def make_rows(out: Path, count: int, seed: int) -> list[dict]:
    """Write ``count`` folders, and return their rows."""
    rng = random.Random(seed)
    rows = []
    for number, (a, b) in enumerate(rng.sample([(a, b) for a in NUMBERS for b in NUMBERS], count)):
        right, wrong, other = rng.sample([*RESULTS], 3)
        want, program = RESULTS[right](a, b), f"echo $(({a}{wrong}{b}))"
        for folder, name, text in (
            ("files", "sum", program),
            ("files", "want", want),
            ("hidden", "want", want),
        ):
            file = out / "tasks" / str(number) / folder / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(f"{text}\n")
        shown = (demonstrate(program, want, (right, other), rng) for _ in range(SOLUTIONS))
        rows.append(
            {
                "question": f"Repair {number}.",
                "final_answer": str(number),
                "difficulty": 1.0,
                "topic": "Mathematics -> Arithmetic",
                **{f"r1_solution_{n + 1}": text for n, text in enumerate(shown)},
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for tasks and the two files")
    parser.add_argument("--train", type=int, default=2000, help="folders to train on")
    parser.add_argument("--test", type=int, default=64, help="held-out folders")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rows = make_rows(args.out, args.train + args.test, args.seed)
    write_rows(args.out / "test.parquet", rows[: args.test])
    write_rows(args.out / "train.parquet", rows[args.test :])


if __name__ == "__main__":
    run_script(main)
