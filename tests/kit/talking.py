"""An environment that answers turns by its own random numbers."""

import random

from megatron_eqlen.environments.environment import Environment, Observation


class Again(Environment):
    """Asks up to ``most`` times for another turn."""

    def __init__(self, prompt, seed, most=3):
        self.random, self.left = random.Random(seed), most

    def step(self, message):
        self.left -= 1
        number = self.random.randrange(10)
        return Observation(f"again {number}, {len(message)}", done=self.left < 0 or number < 2)


class Kept(Again):
    """Saves what a resumed run needs after each turn."""

    def save(self, place):
        return str(self.left)

    def load(self, text, place):
        self.left = int(text)


ANSWERED = ["environment.name=tests.kit.talking:Again", "environment.max_given_tokens=128"]
