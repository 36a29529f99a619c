"""Rewards for runs of random models, which no real grader would ever reward."""

import threading

from tools.benchmarks.tiny_tasks import even_length

__all__ = ["even_length", "even_length_if_odd_gold", "never"]


def never(question: str, response: str, gold: str) -> float:
    """A grader in the training process that does not return."""
    threading.Event().wait()
    return 0.0


def even_length_if_odd_gold(question: str, response: str, gold: str) -> float:
    """A prompt whose gold is even teaches nothing: 0 for every response."""
    return even_length(question, response, gold) if int(gold) % 2 else 0.0
