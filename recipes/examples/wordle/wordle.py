"""Wordle: six guesses for a word, the prompt's gold; the answer marks the letters of each."""

import re
from collections import Counter
from functools import cache
from pathlib import Path

from megatron_eqlen.environments.environment import Environment, Observation

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
