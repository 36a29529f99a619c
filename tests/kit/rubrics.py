"""Rewards for runs of random models, to which real graders would give no reward."""

import threading


def even_length(question: str, response: str, gold: str) -> float:
    """Return 1 for a response with an even number of characters."""
    return float(len(response) % 2 == 0)


def never(question: str, response: str, gold: str) -> float:
    """Never return: a grader in the training process that hangs."""
    threading.Event().wait()
    return 0.0


def even_length_if_odd_gold(question: str, response: str, gold: str) -> float:
    """Return 0 for every response to an even gold, which teaches nothing; else 1 for even length."""
    return even_length(question, response, gold) if int(gold) % 2 else 0.0


def even_and_brief(question: str, response: str, gold: str) -> dict[str, float]:
    """Return two named rewards, for ``reward.weights``."""
    return {"even": even_length(question, response, gold), "brief": float(len(response) < 40)}
