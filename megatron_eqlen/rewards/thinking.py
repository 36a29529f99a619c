"""Finds where a response's answer begins: after the model's thinking."""

from __future__ import annotations

END_OF_THINKING = "</think>"
"""End tag of the thinking. Prompts of thinking models end with ``<think>``, so responses hold this tag alone,
or none."""


def answer_section(text: str, longest: int) -> str:
    """Return the text after the last ``</think>``, the whole text without one; at most its last ``longest``
    characters."""
    return text.rpartition(END_OF_THINKING)[2][-longest:]
