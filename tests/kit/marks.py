"""Which tests are for the whole suite alone."""

from collections.abc import Iterable
from typing import Any

import pytest


def slow(*values: Any) -> Any:
    """A parameter that ``tools/test --fast`` leaves out: cheaper ones of its test show nearly as much."""
    return pytest.param(*values, marks=pytest.mark.slow)


def slow_but(kept: set[str], names: Iterable[str], *before: Any) -> list[Any]:
    """Parameters: each of ``names``, after those ``before`` it; the ones that are not ``kept`` are slow."""
    assert kept <= set(names)
    return [pytest.param(*before, name) if name in kept else slow(*before, name) for name in names]
