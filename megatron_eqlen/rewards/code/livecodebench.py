"""LiveCodeBench's own way of running a program (lcb_runner/evaluation/testing_util.py, July 2025).

Two uses. ``names`` are in force for every LiveCodeBench problem: its preamble's imports, so that a program
that never imports ``List`` or ``heapq`` runs, as it does there. ``outcomes`` runs a program exactly as the
checker does, including the faults of its replacements of stdin and stdout (``reward.lcb_strict``).
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
MISSING_MODULES = ("ipdb", "joblib", "resource", "psutil", "tkinter")
MISSING_FUNCTIONS = {
    builtins: "quit help",
    os: "kill system putenv remove removedirs rmdir fchdir setuid fork forkpty killpg rename renames "
    "truncate replace unlink fchmod fchown chmod chown chroot lchflags lchmod lchown getcwd chdir",
    shutil: "rmtree move chown",
    subprocess: "Popen",
}
"""Functions that the checker sets to None before a program runs."""

for _name in STARRED:  # before any program: it then only copies names
    importlib.import_module(_name)


class TimeoutException(Exception):
    """Raised in the program when a test's time is over; a program that catches everything survives it."""


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


def outcomes(
    source: str, inputs: list[Any], function: str | None, seconds: float
) -> Iterator[tuple[str, str]]:
    """Yield the outcome of each test: ``output`` or ``result`` with its text, or a verdict with the error.

    Ends with the first error. All tests share one process, ``seconds`` of wall-clock time are for each.
    """
    if "numpy" in source:
        importlib.import_module("numpy")  # as the checker does: later numpy could not be imported any more
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
    for name in MISSING_MODULES:
        sys.modules[name] = None  # pyright: ignore[reportArgumentType] (documented: an import fails)


def _load(code: str) -> Any:
    module = ModuleType("tmp_sol")
    exec(compile(code, "solution.py", "exec", dont_inherit=True), module.__dict__)
    return module.Solution() if "class Solution" in code else module


def _load_function(source: str, function: str) -> Callable[[list[Any]], tuple[str, str]]:
    method = getattr(_load(f"{PREAMBLE}\n\n{source}"), function)
    return lambda arguments: ("result", encode(method(*arguments)))


def _load_program(source: str) -> Callable[[str], tuple[str, str]]:
    """Return the program as the body of one function, after its top-level imports."""
    body = ast.parse(_without_main_guard(source)).body
    imports = [statement for statement in body if isinstance(statement, ast.Import | ast.ImportFrom)]
    function = ast.parse("def wrapped_function(): pass").body[0]
    assert isinstance(function, ast.FunctionDef)
    function.body = [statement for statement in body if statement not in imports]
    module = _load("\n".join([PREAMBLE, _text_of(imports), ast.unparse(function)]))
    return lambda text: ("output", _output(module.wrapped_function, text))


def _without_main_guard(source: str) -> str:
    body = ast.parse(source).body
    last = body[-1] if body else None
    if isinstance(last, ast.If) and ast.unparse(last.test) == "__name__ == '__main__'":
        return _text_of(body[:-1]) + "\n" + _text_of(last.body)
    return source


def _text_of(statements: list[Any]) -> str:
    """Unparse statements as LiveCodeBench does, from lists, which ``ast`` does not declare."""
    return ast.unparse(statements)  # pyright: ignore[reportArgumentType]


def _output(program: Callable[[], Any], text: str) -> str:
    """Return what ``program`` prints, with stdin, stdout and ``open`` replaced; sys.exit is a normal end."""
    real, lines = sys.stdin, iter(text.split("\n"))
    real.read = lambda *_: text  # for programs that imported stdin by name before it was replaced
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
        """Fail like the checker's ``close``, which takes an argument that nobody passes."""
        return 1


class _Stdin:
    """Replaces stdin as the checker does: each ``read`` returns everything again, and it cannot be
    iterated."""

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
    """Replaces ``stdin.buffer`` as the checker does: every line that is read is the first line."""

    def __init__(self, text: str) -> None:
        self._data = text.encode()

    def read(self, *_: Any) -> bytes:
        return self._data

    def readline(self, *_: Any) -> bytes:
        return self._data.split(b"\n")[0] + b"\n"


def _time_is_over(*_: Any) -> None:
    print("time is over")  # corrupts the output of a program that catches the timeout
    raise TimeoutException


@contextlib.contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
