"""How LiveCodeBench's own checker runs a program (lcb_runner/evaluation/testing_util.py, July 2025).

Two uses. ``names`` are in force for every LiveCodeBench problem: what its preamble imports, so that a program
that never imports ``List`` or ``heapq`` runs, as it does there. ``outcomes`` runs a program exactly as the
checker does, the faults of its stand-ins for stdin and stdout included (``reward.lcb_strict``).
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import importlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

MODULES = (
    "string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random", "statistics",
    "itertools", "functools", "operator", "io", "sys", "json",
)  # fmt: skip
"""Imported by name, after everything in them and in ``builtins`` and ``typing`` was imported by ``*``."""
STARRED = (*MODULES, "builtins", "typing")
RECURSION_LIMIT = 50_000
LARGEST_INTEGER_TEXT = 50_000
"""Digits that ``str`` and ``int`` convert."""
MEMORY_MB = 4096
"""The checker sets no limit; its comment speaks of 4 GB."""
PREAMBLE = "\n".join(
    [f"from {name} import *" for name in STARRED]
    + [f"import {name}" for name in MODULES]
    + [f"sys.setrecursionlimit({RECURSION_LIMIT})"]
)
MISSING_MODULES = ("ipdb", "joblib", "resource", "psutil", "tkinter")
MISSING_FUNCTIONS = {
    builtins: "quit help",
    os: "kill system putenv remove removedirs rmdir fchdir setuid fork forkpty killpg rename renames "
    "truncate replace unlink fchmod fchown chmod chown chroot lchflags lchmod lchown getcwd chdir",
    shutil: "rmtree move chown",
    subprocess: "Popen",
}
"""Set to None before a program runs."""

for _name in STARRED:  # before any program: it then only copies names
    importlib.import_module(_name)


class TimeoutException(Exception):
    """Raised in the program when a test's time is over; a program that catches everything survives it."""


def prepare(namespace: dict[str, Any]) -> None:
    """Put the preamble's names into ``namespace`` and its limits in force."""
    sys.set_int_max_str_digits(LARGEST_INTEGER_TEXT)
    exec(compile(PREAMBLE, "preamble", "exec", dont_inherit=True), namespace)


def encode(value: Any) -> str:
    """JSON that equals an expected value where ``value`` does by Python's ``==``, a tuple taken for a list.

    What equals no JSON value (a tuple inside a list, a key that is no text) gives text that is no JSON.
    """
    try:
        return json.dumps(_plain(list(value) if isinstance(value, tuple) else value))
    except TypeError as error:
        return f"no JSON value: {error}"


def number_like(value: Any) -> int | float:
    """The plain number that equals a NumPy scalar, Decimal or Fraction. Raises TypeError if there is none."""
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


def outcomes(
    source: str, inputs: list[Any], function: str | None, seconds: float
) -> Iterator[tuple[str, str]]:
    """For each test what came of it: ``output`` or ``result`` and its text, or a verdict and the error.

    Ends with the first error. All tests share one process, ``seconds`` of wall-clock time are for each.
    """
    if "numpy" in source:
        importlib.import_module("numpy")  # the checker has it in memory before it takes away what numpy needs
    _disarm()
    signal.signal(signal.SIGALRM, _time_is_over)
    try:
        with _alarm(seconds):
            run = _load_function(source, function) if function else _load_program(source)
    except Exception as error:  # noqa: BLE001 - the program's, whatever it is
        yield _failure(error)
        return
    for given in inputs:
        try:
            with _alarm(seconds):
                outcome = run(given)
        except Exception as error:  # noqa: BLE001
            yield _failure(error)
            return
        yield outcome


def _failure(error: Exception) -> tuple[str, str]:
    verdict = "time_limit" if isinstance(error, TimeoutException) else "runtime_error"
    return verdict, f"{type(error).__name__}: {error}"


def _disarm() -> None:
    sys.set_int_max_str_digits(LARGEST_INTEGER_TEXT)
    for owner, names in MISSING_FUNCTIONS.items():
        for name in names.split():
            setattr(owner, name, None)
    sys.modules.update(dict.fromkeys(MISSING_MODULES))  # None: an import fails


def _load(code: str) -> Any:
    module = ModuleType("tmp_sol")
    exec(compile(code, "solution.py", "exec", dont_inherit=True), module.__dict__)
    return module.Solution() if "class Solution" in code else module


def _load_function(source: str, function: str) -> Callable[[list[Any]], tuple[str, str]]:
    method = getattr(_load(f"{PREAMBLE}\n\n{source}"), function)
    return lambda arguments: ("result", encode(method(*arguments)))


def _load_program(source: str) -> Callable[[str], tuple[str, str]]:
    """The whole program becomes the body of one function, its top-level imports come before."""
    body = ast.parse(_without_main_guard(source)).body
    imports = [one for one in body if isinstance(one, ast.Import | ast.ImportFrom)]
    function = ast.parse("def wrapped_function(): pass").body[0]
    function.body = [one for one in body if one not in imports]
    module = _load("\n".join([PREAMBLE, ast.unparse(imports), ast.unparse(function)]))
    return lambda text: ("output", _output(module.wrapped_function, text))


def _without_main_guard(source: str) -> str:
    body = ast.parse(source).body
    last = body[-1] if body else None
    if isinstance(last, ast.If) and ast.unparse(last.test) == "__name__ == '__main__'":
        return ast.unparse(body[:-1]) + "\n" + ast.unparse(last.body)
    return source


def _output(program: Callable[[], Any], text: str) -> str:
    """What ``program`` prints, with stand-ins for stdin, stdout and ``open``; sys.exit ends it well."""
    real, lines = sys.stdin, iter(text.split("\n"))
    real.read = lambda *_: text  # where `from sys import stdin` came before the stand-in
    real.readline = lambda *_: next(lines)
    real.readlines = lambda *_: text.split("\n")
    saved = sys.stdin, sys.stdout, builtins.open
    sys.stdin, sys.stdout, builtins.open = _Stdin(text), _Stdout(), _opener(text)
    printed = sys.stdout
    try:
        with contextlib.suppress(SystemExit):
            program()
    finally:
        sys.stdin, sys.stdout, builtins.open = saved
    return printed.getvalue()


def _opener(text: str) -> Callable[..., Any]:
    def open_mock(*arguments: Any, **options: Any) -> Any:
        from unittest.mock import mock_open  # late: it is slow to import, and few programs come here

        return mock_open(read_data=text)(*arguments, **options)

    return open_mock


class _Stdout(io.StringIO):
    def close(self, _: Any) -> int:
        """Closing it is an error: it is called without an argument."""
        return 1


class _Stdin:
    """Stands in for stdin: ``read`` never comes to an end, and it cannot be iterated."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._lines = io.StringIO(text)
        self.buffer = _Buffer(text)

    def read(self, *_: Any) -> str:
        return self._text

    def readline(self, *arguments: Any) -> str:
        return self._lines.readline(*arguments)

    def readlines(self, *_: Any) -> list[str]:
        return self._text.split("\n")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lines, name)


class _Buffer:
    """Stands in for ``stdin.buffer``: every line that is read is the first."""

    def __init__(self, text: str) -> None:
        self._data = text.encode()

    def read(self, *_: Any) -> bytes:
        return self._data

    def readline(self, *_: Any) -> bytes:
        return self._data.split(b"\n")[0] + b"\n"


def _time_is_over(*_: Any) -> None:
    print("time is over")  # spoils the output of a program that survives
    raise TimeoutException


@contextlib.contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
