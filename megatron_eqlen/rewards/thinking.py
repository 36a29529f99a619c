"""Where a response's answer begins: after the model's thinking."""

from __future__ import annotations

END_OF_THINKING = "</think>"
"""Prompts of thinking models end with ``<think>``, so responses hold only this one, or none."""


def answer_section(text: str, longest: int) -> str:
    """What follows the last ``</think>``, the whole text without one; of that at most the last ``longest``
    characters."""
    return text.rpartition(END_OF_THINKING)[2][-longest:]
