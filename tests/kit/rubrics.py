"""Rewards for runs of random models, which no real grader would ever reward."""

import threading


def even_length(question: str, response: str, gold: str) -> float:
    """1 for a response with an even number of characters."""
    return float(len(response) % 2 == 0)


def never(question: str, response: str, gold: str) -> float:
    """A grader in the training process that does not return."""
    threading.Event().wait()
    return 0.0


def even_length_if_odd_gold(question: str, response: str, gold: str) -> float:
    """A prompt whose gold is even teaches nothing: 0 for every response."""
    return even_length(question, response, gold) if int(gold) % 2 else 0.0
