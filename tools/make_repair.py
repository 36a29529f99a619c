#!/usr/bin/env python
"""Write folders to repair, OUT/tasks; questions about them, OUT/train.jsonl and OUT/test.jsonl; and
OUT/demonstrations.jsonl, chats that tools/make_tiny_model.py imitates.

    tools/make_repair.py --out runs/repair/data

A folder has a program ``sum`` that computes with a wrong sign, and the number ``want`` that it should print.
A demonstration looks at both and changes the sign, or changes it without a look, right half the time;
some take a wrong sign after a look. So a model that imitates them can improve by looking first.
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

LOOKS, SLIPS = 0.5, 0.25
"""Shares of demonstrations that look first, and of those that then take a wrong sign."""
DEMONSTRATIONS = 3
"""Number for each folder to train on."""
NUMBERS = range(11, 100)
RESULTS = {"+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b}


def demonstrate(
    number: int, program: str, want: int, signs: tuple[str, str], rng: random.Random
) -> list[Turn]:
    """``signs``: the right one and another that is not in the program."""
    looks = rng.random() < LOOKS
    chosen = signs[rng.random() < (SLIPS if looks else 0.5)]
    return [
        {"role": "user", "content": question(number)},
        *(called("run", {"command": "cat sum want"}, f"{program}\n{want}") if looks else []),
        *called("run", {"command": f"sed -i 's/[-+*]/{chosen}/' sum"}, "(no output)"),
        {"role": "assistant", "content": "done"},
    ]


def question(number: int) -> str:
    return f"Repair {number}."


def make_folders(out: Path, count: int, rng: random.Random) -> list[list[list[Turn]]]:
    """Write ``count`` folders, and return demonstrations of each."""
    shown = []
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
        signs = (right, other)
        shown.append([demonstrate(number, program, want, signs, rng) for _ in range(DEMONSTRATIONS)])
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for tasks and the three files")
    parser.add_argument("--train", type=int, default=2000, help="folders to train on")
    parser.add_argument("--test", type=int, default=64, help="held-out folders")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if min(args.train, args.test) < 1:
        parser.error(f"--train and --test: expected numbers from 1 on, found {args.train} and {args.test}")
    shown = make_folders(args.out, args.train + args.test, random.Random(args.seed))
    rows = [{"question": question(number), "answer": str(number)} for number in range(len(shown))]
    write_lines(args.out / "test.jsonl", rows[: args.test])
    write_lines(args.out / "train.jsonl", rows[args.test :])
    chats = [{"messages": chat} for chats in shown[args.test :] for chat in chats]
    write_lines(args.out / "demonstrations.jsonl", chats)


if __name__ == "__main__":
    run_script(main)
