"""Reward of answers in plain text: the last number of a response counts, as people write it."""

import re


def last_number(response: str, answer: str) -> float:
    """Return 1 if the last number of the response is the answer, else 0. ``1,234.50`` is 1234.5."""
    numbers = re.findall(r"-?\d[\d,]*(?:\.\d+)?", response)
    return float(bool(numbers) and float(numbers[-1].replace(",", "")) == float(answer))
