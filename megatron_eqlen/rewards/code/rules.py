"""LiveCodeBench's own rules (lcb_runner/evaluation/testing_util.py, July 2025) for its problems.

The names of its preamble are in force, so that a program that never imports ``List`` or ``heapq`` runs, as it
does there; and a function's value must equal the expected one by Python's ``==``.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import sys
from typing import Any

MODULES = (
    "string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random", "statistics",
    "itertools", "functools", "operator", "io", "sys", "json",
)  # fmt: skip
"""Modules imported by name, after ``*`` imports of all of them and of ``builtins`` and ``typing``."""
STARRED = (*MODULES, "builtins", "typing")
RECURSION_LIMIT = 50_000
LARGEST_INTEGER_TEXT = 50_000
"""Most digits that ``str`` and ``int`` convert."""
MEMORY_MB = 4096
"""The checker sets no limit; a comment in it names 4 GB."""
PREAMBLE = "\n".join(
    [f"from {name} import *" for name in STARRED]
    + [f"import {name}" for name in MODULES]
    + [f"sys.setrecursionlimit({RECURSION_LIMIT})"]
)

for _name in STARRED:  # before any program: it then only copies names
    importlib.import_module(_name)


def prepare(namespace: dict[str, Any]) -> None:
    """Put the preamble's names into ``namespace`` and its limits in force."""
    sys.set_int_max_str_digits(LARGEST_INTEGER_TEXT)
    exec(compile(PREAMBLE, "preamble", "exec", dont_inherit=True), namespace)


def encode(value: Any) -> str:
    """Return JSON that equals the expected value's exactly if ``value`` equals it by Python's ``==`` (a tuple
    counts as a list).

    A value that equals no JSON value (a tuple inside a list, a key that is not text) gives text that is not
    JSON.
    """
    try:
        return json.dumps(_plain(list(value) if isinstance(value, tuple) else value))
    except TypeError as error:
        return f"no JSON value: {error}"


def number_like(value: Any) -> int | float:
    """Return the plain number that equals a NumPy scalar, Decimal or Fraction. Raises TypeError if there is
    none."""
    for kind in (int, lambda scalar: float(str(scalar)), float):  # 0.3 of a float32, not 0.30000001192
        with contextlib.suppress(TypeError, ValueError, OverflowError):
            if (number := kind(value)) == value:
                return number
    raise TypeError(f"{type(value).__name__} {value!r:.80}")


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, tuple | dict):
        raise TypeError(f"{type(value).__name__} {value!r:.80}")
    return number_like(value)
