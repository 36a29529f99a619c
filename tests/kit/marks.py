"""What only the whole suite does, and ``tools/test --fast`` not."""

import os
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import settings

FEWER = int(os.environ.get("EQLEN_FEWER_EXAMPLES", "1"))
"""``tools/test --fast`` tries a fourth of a property's examples."""


def examples(count: int) -> settings:
    """A property's number of examples; none has a deadline, a machine may be busy."""
    return settings(max_examples=max(1, count // FEWER), deadline=None)


def slow(*values: Any) -> Any:
    """A parameter that ``tools/test --fast`` leaves out: cheaper ones of its test show nearly as much."""
    return pytest.param(*values, marks=pytest.mark.slow)


def slow_but(kept: set[str], names: Iterable[str], *before: Any) -> list[Any]:
    """Parameters: each of ``names``, after those ``before`` it; the ones that are not ``kept`` are slow."""
    assert kept <= set(names)
    return [pytest.param(*before, name) if name in kept else slow(*before, name) for name in names]
