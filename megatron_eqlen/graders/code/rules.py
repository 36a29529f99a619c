"""The rules of data sets' own checkers: ``livecodebench`` (lcb_runner/evaluation/testing_util.py, July 2025)
and ``apps`` (testing_util.py of APPS and TACO).

Names of a set's preamble are defined, so a program that never imports ``List`` or ``heapq`` runs, as it does
there. This file needs the standard library alone, since it runs in other interpreters.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import sys
from types import CodeType, ModuleType
from typing import Any, Literal

Rules = Literal["plain", "livecodebench", "apps"]
MODULES = (
    "string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random", "statistics",
    "itertools", "functools", "operator", "io", "sys", "json",
)  # fmt: skip
"""Modules that LiveCodeBench imports by name, after ``*`` imports of ``STARRED``."""
STARRED = (*MODULES, "builtins", "typing")
RECURSION_LIMIT = 50_000
LARGEST_INTEGER_TEXT = 50_000
"""Most digits that ``str`` and ``int`` convert."""
MEMORY_MB = 4096
"""The checker sets no limit; a comment in it names 4 GB."""
PREAMBLES: dict[Rules, str] = {
    "plain": "",
    "livecodebench": "\n".join(
        [f"from {name} import *" for name in STARRED]
        + [f"import {name}" for name in MODULES]
        + [f"sys.setrecursionlimit({RECURSION_LIMIT})", f"sys.set_int_max_str_digits({LARGEST_INTEGER_TEXT})"]
    ),
    "apps": """\
from typing import *
import sys, time, itertools, collections, math, fractions, random, heapq
from itertools import accumulate, product, permutations, combinations
from collections import Counter, OrderedDict, deque, defaultdict, ChainMap
from functools import lru_cache
from math import sqrt, sin, cos, tan, ceil, fabs, floor, gcd, exp, log, log2
from heapq import *
stdin, stdout = sys.stdin, sys.stdout
try:
    import numpy as np
except ImportError:
    pass
""",
}
"""Code before a program. Of ``typing``, APPS imports two names alone, but its starter code uses others."""

for _name in (*STARRED, "fractions", "time"):  # before any program: it then only copies names
    importlib.import_module(_name)


def call(main: ModuleType, code: CodeType, function: str | None, rules: Rules) -> str | None:
    """Run a program in the module ``main`` after its set's preamble. Return None, or the JSON of what
    ``function``, its own or its ``class Solution``'s, returns on the arguments in stdin."""
    # ``dont_inherit``: this file's ``from __future__`` must not hold for the program.
    exec(compile(PREAMBLES[rules], "preamble", "exec", dont_inherit=True), main.__dict__)
    main.__name__ = "__main__" if function is None else "solution"  # whose ``__main__`` part is not run
    exec(code, main.__dict__)
    if function is None:
        return None
    owner = main.Solution() if hasattr(main, "Solution") else main
    return encode(rules, getattr(owner, function)(*arguments(rules, sys.stdin.read())))


def arguments(rules: Rules, lines: str) -> list[Any]:
    """Return a function's arguments, one JSON value a line. JSON's keys are texts: as APPS does, make
    integers of the keys of a first argument that is an object, if possible."""
    values = [json.loads(line) for line in lines.split("\n") if line.strip()]
    if rules == "apps" and values and isinstance(values[0], dict):
        with contextlib.suppress(ValueError):
            values[0] = {int(key): value for key, value in values[0].items()}
    return values


def encode(rules: Rules, value: Any) -> str:
    """Return JSON of a function's result: tuples are lists, NumPy's scalars are numbers.

    By LiveCodeBench's rules the JSON equals the expected value's only if ``value`` equals it by Python's
    ``==`` (a tuple counts as a list). A value that equals no JSON value (a tuple inside a list, a key that is
    not text) gives text that is not JSON.
    """
    if rules != "livecodebench":
        return json.dumps(value, default=number_like)
    try:
        return json.dumps(_plain(list(value) if isinstance(value, tuple) else value))
    except TypeError as error:
        return f"no JSON value: {error}"


def number_like(value: Any) -> int | float:
    """Return the plain number equal to a NumPy scalar, Decimal or Fraction. Raises TypeError for others."""
    # An exact integer if it is one, else the shortest decimal that reads back.
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
    return number_like(value)
