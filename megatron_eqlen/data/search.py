"""Search by trial in modular arithmetic, with worked responses, in DeepMath-103K's schema.

A question is ``Find $x$ with $7x+4=9$ modulo $11$.``; the answer is one of 0..10. A response tries values
until one fits, for example

    3:10+4=3        7 x 3 is 10 modulo 11, and with 4 it is 3: not 9
    8:1+4=5
    7:5+4=9
    \\boxed{7}

Values are tried at random, also again, so each try ends the search with the same probability whatever came
before: lengths are geometric, and their coefficient of variation is near 1. Some responses give up before a
try and name the answer, which a model that imitates them can only guess; some search in order, which is
better; some check what they found. So a right answer may be short or long, and a model can improve by not
giving up, by searching in order, and by computing without slips.

Everything is a function of the seed. The rows of one call have distinct questions.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

SOLUTIONS = 3


@dataclass(frozen=True)
class Dials:
    """What shapes the lengths."""

    moduli: Sequence[int] = (7, 11, 13)
    """Primes; a search at random takes as many tries on average, if it does not give up."""
    gives_up: float = 0.08
    """Probability before each try: shorter responses, and more wrong ones."""
    in_order: float = 0.15
    """Share of searches that try 0, 1, 2, ...: never longer than the modulus."""
    checks: float = 0.2
    """Share of searches that write the try that fits once more."""


@dataclass(frozen=True)
class Puzzle:
    """Find x with factor x + offset = target, modulo ``modulus``."""

    modulus: int
    factor: int
    offset: int
    target: int

    @property
    def question(self) -> str:
        return f"Find $x$ with ${self.factor}x+{self.offset}={self.target}$ modulo ${self.modulus}$."

    @property
    def answer(self) -> int:
        return (self.target - self.offset) * pow(self.factor, -1, self.modulus) % self.modulus

    def attempt(self, x: int) -> str:
        """The line that tries ``x``."""
        product = self.factor * x % self.modulus
        return f"{x}:{product}+{self.offset}={(product + self.offset) % self.modulus}"


def draw_puzzle(rng: random.Random, moduli: Sequence[int]) -> Puzzle:
    modulus = rng.choice(moduli)
    return Puzzle(modulus, rng.randrange(1, modulus), rng.randrange(modulus), rng.randrange(modulus))


def demonstrate(puzzle: Puzzle, dials: Dials, rng: random.Random) -> str:
    """A response that ends with the right answer, found or not."""
    lines = [puzzle.attempt(x) for x in search(puzzle, dials, rng)]
    found = lines[-1:] == [puzzle.attempt(puzzle.answer)]
    if found and rng.random() < dials.checks:
        lines += ["Check:", lines[-1]]
    return "\n".join([*lines, f"\\boxed{{{puzzle.answer}}}"])


def search(puzzle: Puzzle, dials: Dials, rng: random.Random) -> Iterator[int]:
    """The values tried, up to the one that fits or to the last before it gives up."""
    in_order = rng.random() < dials.in_order
    tried = 0
    while rng.random() >= dials.gives_up:
        x = tried if in_order else rng.randrange(puzzle.modulus)
        yield x
        if x == puzzle.answer:
            return
        tried += 1


def make_rows(count: int, seed: int, dials: Dials = Dials()) -> list[dict]:
    """``count`` rows with distinct questions. Raises ValueError for more than there are."""
    most = sum((modulus - 1) * modulus**2 for modulus in {*dials.moduli})
    if count > most:
        raise ValueError(f"count: expected at most {most} questions for moduli {dials.moduli}, found {count}")
    rng = random.Random(seed)
    puzzles: dict[str, Puzzle] = {}
    while len(puzzles) < count:
        puzzle = draw_puzzle(rng, dials.moduli)
        puzzles.setdefault(puzzle.question, puzzle)
    return [_row(puzzle, dials, rng) for puzzle in puzzles.values()]


def _row(puzzle: Puzzle, dials: Dials, rng: random.Random) -> dict:
    solutions = {f"r1_solution_{n + 1}": demonstrate(puzzle, dials, rng) for n in range(SOLUTIONS)}
    return {
        "question": puzzle.question,
        "final_answer": str(puzzle.answer),
        "difficulty": float(puzzle.modulus),
        "topic": "Mathematics -> Number Theory -> Congruences",
        **solutions,
    }
