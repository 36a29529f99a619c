"""Wordle: six guesses for a word, the prompt's gold; the answer marks the letters of each.

python -m recipes.examples.wordle.wordle        writes runs/wordle/data/train.parquet and test.parquet
"""

import random
import re
from collections import Counter
from functools import cache
from pathlib import Path

from megatron_eqlen.environments.environment import Environment, Observation
from tools.make_search import write_rows
from tools.tokenizer_maker import END_OF_TURN, START_OF_TURN

RIGHT, ELSEWHERE, ABSENT = "GY-"
"""Marks of a letter in its place, of one that belongs elsewhere, and of one that is not in the word."""


def marks(guess: str, secret: str) -> str:
    """Return a mark for each letter. A letter is marked as often as the secret has it, places first."""
    left = Counter(s for g, s in zip(guess, secret, strict=True) if g != s)
    shown = ""
    for g, s in zip(guess, secret, strict=True):
        near = g != s and left[g] > 0
        left[g] -= near
        shown += RIGHT if g == s else ELSEWHERE if near else ABSENT
    return shown


@cache
def read_words(path: str) -> frozenset[str]:
    return frozenset(Path(path).read_text(encoding="utf-8").lower().split())


class Wordle(Environment):
    """A guess is the last word in square brackets of a turn. Reward 1 if the word is guessed, else 0."""

    def __init__(self, prompt, seed, words=None, most_guesses=6):
        """``words``: file of the words that count as guesses; without one all words of the right length."""
        self.secret, self.left = prompt.gold.strip().lower(), most_guesses
        self.words = words and read_words(words)
        self.guessed = False

    def step(self, message):
        guesses = re.findall(r"\[([a-z]+)\]", message.lower())
        self.left -= 1
        if guesses and guesses[-1] == self.secret:
            self.guessed = True
        if self.guessed or not self.left:
            return Observation(done=True)
        if not guesses or len(guesses[-1]) != len(self.secret):
            return Observation(f"Guess a word of {len(self.secret)} letters in [ ].")
        if self.words and guesses[-1] not in self.words:
            return Observation(f"{guesses[-1]} is not in the list.")
        return Observation(f"{guesses[-1]} {marks(guesses[-1], self.secret)}")

    def grade(self):
        return float(self.guessed)


# ---- games, with demonstrations for a tiny model ----------------------------------------------------------

ANIMALS = ["ant", "bee", "cat", "cow", "dog", "elk", "fox", "hen"]


def demonstrate(secret: str, rng: random.Random) -> str:
    """Return the turns of a game. Every other player guesses what all marks allow, the others anything."""
    careful, possible, said = rng.random() < 0.5, ANIMALS, ""
    for left in range(5, -1, -1):
        guess = rng.choice(possible if careful else ANIMALS)
        said += f"[{guess}]"
        if guess == secret or not left:
            break
        seen = marks(guess, secret)
        tool, policy = (f"{END_OF_TURN}\n{START_OF_TURN}{role}\n" for role in ("tool", "assistant"))
        said += f"{tool}{guess} {seen}{policy}"
        possible = [word for word in possible if marks(guess, word) == seen]
    return said


def make_rows(count: int, rng: random.Random) -> list[dict]:
    return [
        {
            "question": f"Game {number}: guess the animal.",
            "final_answer": (secret := rng.choice(ANIMALS)),
            "difficulty": 1.0,
            "topic": "wordle",
            **{f"r1_solution_{n + 1}": demonstrate(secret, rng) for n in range(3)},
        }
        for number in range(count)
    ]


if __name__ == "__main__":
    rows = make_rows(1920, random.Random(0))
    write_rows(Path("runs/wordle/data/test.parquet"), rows[:128])
    write_rows(Path("runs/wordle/data/train.parquet"), rows[128:])
