"""Rewards for runs of random models, which no real grader would ever reward."""


def even_length(question: str, response: str, gold: str) -> float:
    """1 for a response with an even number of characters."""
    return float(len(response) % 2 == 0)
