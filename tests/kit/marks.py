"""Marks of tests that only the whole suite runs, and ``tools/test --fast`` does not."""

import os
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import settings

FEWER = int(os.environ.get("EQLEN_FEWER_EXAMPLES", "1"))
"""Divisor of a property's examples: ``tools/test --fast`` tries a fourth."""
MORE = int(os.environ.get("EQLEN_RANDOM_EXAMPLES", "0"))
"""Factor of a property's examples, which are then random (weekly); 0: the same ones in every run."""


def examples(count: int) -> settings:
    """Return a property's settings: ``count`` examples, no deadline, because a machine may be busy."""
    tries = max(1, count * (MORE or 1) // FEWER)
    return settings(max_examples=tries, deadline=None, derandomize=not MORE)


def slow(*values: Any) -> Any:
    """Return a parameter that ``tools/test --fast`` leaves out: cheaper ones show nearly as much."""
    return pytest.param(*values, marks=pytest.mark.slow)


EACH_WEEK = pytest.mark.skipif(not MORE, reason="only each week")


def weekly(*values: Any) -> Any:
    """Return a parameter for the weekly run: each of its mechanisms has a case, and this one joins them."""
    return pytest.param(*values, marks=[pytest.mark.slow, EACH_WEEK])


def weekly_but(kept: set[str], names: Iterable[str]) -> list[Any]:
    """Return ``names`` as parameters, of which a push's run tries those that are ``kept``."""
    return [name if name in kept else weekly(name) for name in names]
