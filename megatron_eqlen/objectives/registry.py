"""The named objectives, and which of them go with which sampling."""

from __future__ import annotations


def check_combination(recipe) -> None:
    """Raise ValueError where an objective and the rest of the recipe do not go together."""
