#!/usr/bin/env python
"""Write search puzzles as DeepMath-103K parquet files: OUT/train.parquet and OUT/test.parquet.

    tools/make_search.py --out runs/search/data

The files share no question; the same arguments write the same rows.

Search by trial in modular arithmetic, with worked responses, in DeepMath-103K's schema.

A question is ``Find $x$ with $3x+4+2+6=0$ modulo $7$.``; the answer is one of 0..6. A response tries values
until one fits, for example

    3*3=2+4=6+2=1+6=0     3 x 3 is 2 modulo 7, with 4 it is 6, with 2 it is 1, with 6 it is 0: this fits
    \\boxed{3}

and before that any number of tries that do not, half of them with a remark: ``3*4=5+4=2+2=4+6=3 no``. Values
are tried at random, also again, so each try ends the search with the same probability whatever came before:
lengths are geometric, and their coefficient of variation is near 1. Some responses give up before a try and
name the answer, which a model that imitates them can only guess; some search in order, which is better; some
check what they found. So a right answer may be short or long, and a model can improve by not giving up, by
searching in order, and by computing without slips.

With ``pauses`` and ``closing`` a response also hesitates (`` .``) any number of times after a term and after
its answer, so that no token settles where a try or the response ends. With 0.25 and 90, and a limit of
three times the mean length, a dual-track stream has 6 to 9 pairs, as the paper says of its own.

All numbers have one digit, what is computed stands beside what it is computed from, and what fits ends with
0, so that a small model learns to compute in less than a minute.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from megatron_eqlen.files import replaced
from megatron_eqlen.processes.failures import run_script

SOLUTIONS = 3
PAUSE = " ."
COLUMNS = (
    "question",
    "final_answer",
    "difficulty",
    "topic",
    *(f"r1_solution_{n + 1}" for n in range(SOLUTIONS)),
)
SCHEMA = pa.schema([(name, pa.float64() if name == "difficulty" else pa.string()) for name in COLUMNS])
"""DeepMath-103K's columns."""


@dataclass(frozen=True)
class Dials:
    """Parameters that shape the lengths."""

    moduli: Sequence[int] = (5, 7)
    """Primes. A random search takes this many tries on average, if it does not give up."""
    offsets: int = 3
    """Number of terms without x: more terms make a try longer, and more questions possible."""
    gives_up: float = 0.15
    """Probability of giving up before each try: higher means shorter responses, and more wrong ones."""
    in_order: float = 0.15
    """Share of searches that try 0, 1, 2, ...: never longer than the modulus."""
    checks: float = 0.2
    """Share of searches that repeat the try that fits, as a check."""
    remarks: float = 0.5
    """Share of failed tries that end with a remark, so that searches of equally many tries seldom have equal
    lengths."""
    pauses: float = 0.0
    """Mean number of pauses after a term: tries of equally many terms end at different tokens."""
    closing: float = 0.0
    """Mean number of pauses after the answer. Responses that share their answer then end at different tokens,
    and their lengths have a part that neither reward nor answer depends on."""


@dataclass(frozen=True)
class Puzzle:
    """Find x with factor x + offsets = 0, modulo ``modulus``."""

    modulus: int
    factor: int
    offsets: tuple[int, ...]

    @property
    def question(self) -> str:
        terms = "+".join([f"{self.factor}x", *map(str, self.offsets)])
        return f"Find $x$ with ${terms}=0$ modulo ${self.modulus}$."

    @property
    def answer(self) -> int:
        return -sum(self.offsets) * pow(self.factor, -1, self.modulus) % self.modulus

    def terms(self, x: int) -> Iterator[str]:
        """Yield the line that tries ``x``, term by term."""
        value = self.factor * x % self.modulus
        yield f"{self.factor}*{x}={value}"
        for offset in self.offsets:
            value = (value + offset) % self.modulus
            yield f"+{offset}={value}"


def draw_puzzle(rng: random.Random, dials: Dials) -> Puzzle:
    modulus = rng.choice(dials.moduli)
    offsets = tuple(rng.randrange(modulus) for _ in range(dials.offsets))
    return Puzzle(modulus, rng.randrange(1, modulus), offsets)


def pieces(puzzle: Puzzle, dials: Dials, rng: random.Random) -> Iterator[str]:
    """Yield a response piece by piece."""
    for x in search(puzzle, dials, rng):
        fits = x == puzzle.answer
        yield from _line(puzzle, x, dials, rng)
        yield " no\n" if not fits and rng.random() < dials.remarks else "\n"
        if fits and rng.random() < dials.checks:
            yield "Check:\n"
            yield from _line(puzzle, x, dials, rng)
            yield "\n"
    yield f"\\boxed{{{puzzle.answer}}}"
    yield from _hesitation(dials.closing, rng)


def _line(puzzle: Puzzle, x: int, dials: Dials, rng: random.Random) -> Iterator[str]:
    for term in puzzle.terms(x):
        yield term
        yield from _hesitation(dials.pauses, rng)


def _hesitation(mean: float, rng: random.Random) -> Iterator[str]:
    """Yield a geometric number of pauses."""
    while mean and rng.random() < mean / (1 + mean):
        yield PAUSE


def search(puzzle: Puzzle, dials: Dials, rng: random.Random) -> Iterator[int]:
    """Yield the values tried, up to the one that fits or to the last before it gives up."""
    in_order = rng.random() < dials.in_order
    tried = 0
    while rng.random() >= dials.gives_up:
        x = tried if in_order else rng.randrange(puzzle.modulus)
        yield x
        if x == puzzle.answer:
            return
        tried += 1


def make_rows(count: int, seed: int, dials: Dials = Dials()) -> list[dict]:
    """Return ``count`` rows with distinct questions. Raises ValueError if there are fewer."""
    most = sum((modulus - 1) * modulus**dials.offsets for modulus in {*dials.moduli})
    if count > most:
        raise ValueError(f"count: expected at most {most} questions with {dials}, found {count}")
    rng = random.Random(seed)
    puzzles: dict[str, Puzzle] = {}
    while len(puzzles) < count:
        puzzle = draw_puzzle(rng, dials)
        puzzles.setdefault(puzzle.question, puzzle)
    return [_row(puzzle, dials, rng) for puzzle in puzzles.values()]


def _row(puzzle: Puzzle, dials: Dials, rng: random.Random) -> dict:
    solutions = {f"r1_solution_{n + 1}": "".join(pieces(puzzle, dials, rng)) for n in range(SOLUTIONS)}
    return {
        "question": puzzle.question,
        "final_answer": str(puzzle.answer),
        "difficulty": float(puzzle.modulus),
        "topic": "Mathematics -> Number Theory -> Congruences",
        **solutions,
    }


WORDS = (" so", " um", " hm", " well", " now", " then", " but", " or")


def make_late_rows(count: int, seed: int, words: float = 50) -> list[dict]:
    """Return rows of a task whose outcome is decided late: a code of four digits, after ``words`` random
    words on average. A model that imitates the demonstrations, which slip at every fourth digit, doubts the
    code."""
    rng, codes = random.Random(seed), dict[tuple[int, ...], str]()
    while len(codes) < count:
        digits = tuple(rng.sample(range(10), 4))
        codes[digits] = "".join(str((7 * digit + 3) % 10) for digit in digits)

    def demonstrated(code: str) -> str:
        said = [rng.choice(WORDS) for _ in iter(lambda: rng.random() < words / (words + 1), False)]
        answer = [rng.choice("0123456789".replace(d, "")) if rng.random() < 0.25 else d for d in code]
        return "".join([*said, "\\boxed{", *answer, "}"])

    return [
        {
            "question": f"Code {' '.join(map(str, digits))}.",
            "final_answer": code,
            "difficulty": float(len(digits)),
            "topic": "Mathematics -> Cryptography",
            **{f"r1_solution_{n + 1}": demonstrated(code) for n in range(SOLUTIONS)},
        }
        for digits, code in codes.items()
    ]


def write_rows(path: Path, rows: list[dict]) -> None:
    """Write ``rows`` as a DeepMath-103K parquet file, which appears complete or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replaced(path) as partial:
        pq.write_table(pa.Table.from_pylist(rows, schema=SCHEMA), partial)
    print(f"{path}: {len(rows)} questions")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for the two files")
    parser.add_argument("--train", type=int, default=1800, help="questions to train on")
    parser.add_argument("--test", type=int, default=256, help="held-out questions")
    parser.add_argument("--pauses", type=float, help="mean number after a term (default: 0)")
    parser.add_argument("--closing", type=float, help="mean number of pauses after the answer (default: 0)")
    parser.add_argument("--late", action="store_true", help="make_late_rows, in place of puzzles")
    parser.add_argument("--words", type=float, help="mean number before the code of --late (default: 50)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if min(args.train, args.test) < 1:
        parser.error(f"--train and --test: expected numbers from 1 on, found {args.train} and {args.test}")
    names = ("words", "pauses", "closing")
    given = {name: value for name in names if (value := getattr(args, name)) is not None}
    if other := given.keys() & ({"pauses", "closing"} if args.late else {"words"}):
        parser.error(f"--{min(other)} has no effect with{'' if args.late else 'out'} --late")
    if below := [name for name, value in given.items() if not value >= 0]:
        parser.error(f"--{below[0]}: expected a mean number from 0 on, found {given[below[0]]:g}")
    count, late = args.train + args.test, args.late
    rows = make_late_rows(count, args.seed, **given) if late else make_rows(count, args.seed, Dials(**given))
    write_rows(args.out / "test.parquet", rows[: args.test])
    write_rows(args.out / "train.parquet", rows[args.test :])


if __name__ == "__main__":
    run_script(main)
