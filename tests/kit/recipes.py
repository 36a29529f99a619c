"""A small recipe, for tests that care for some of its keys."""

from __future__ import annotations

from typing import Any

from megatron_eqlen.job import parse
from megatron_eqlen.recipe import Recipe

SMALL: dict[str, Any] = {
    "name": "test", "steps": 1, "model": {"path": "none"},
    "data": {"sources": [{"name": "s", "path": "none"}]},
}  # fmt: skip
OWN_GRADER = {"sources": [{"name": "s", "path": "none", "grader": "math:exp"}]}
"""Section ``data`` with a grader of one's own."""

SAMPLED = {"temperature": 1.0, "top_p": 0.9, "top_k": 0, "min_p": 0.0, "max_response_length": 4096}
"""Sampling of an evaluation, as its manifest has it."""


def small(**changes: Any) -> Recipe:
    """Return a recipe with ``changes``: keys, sections over those of ``SMALL``, or ``section__key=value``."""
    raw = SMALL | {"rollout": {}, "loss": {}}
    for key, value in changes.items():
        section, _, name = key.partition("__")
        value = {name: value} if name else value
        raw[section] = raw.get(section, {}) | value if isinstance(value, dict) else value
    return parse(raw, "test")
