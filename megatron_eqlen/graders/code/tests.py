r"""The tests of a code problem, as ``Prompt.gold`` holds them, and the comparison of outputs.

Without ``function`` a test is a text of stdin and the expected stdout; with it, arguments and their value::

    {"inputs": ["2 3\n"], "outputs": ["5\n"]}
    {"inputs": [[2, 3]], "outputs": [5], "function": "add"}
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from decimal import Decimal
from functools import cached_property
from itertools import zip_longest
from keyword import iskeyword
from typing import Any, get_args

from megatron_eqlen.graders.code.rules import Rules

VERSION = 4
"""Version of the checks of tests and problems. A new check raises it: prepared files are checked again."""
LARGEST_TIME_LIMIT = 3600.0
"""Longest time limit in seconds."""
LARGEST_MEMORY = 1 << 20
"""Largest memory limit in MiB."""
LARGEST_OUTPUT = 64 << 20
"""Most bytes that a test may expect to be printed or returned."""
LONGEST_NAME = 200
DEEPEST_VALUE = 200
"""Deepest nesting of lists and objects, in an argument or a result: a program's recursion is limited."""
TOO_DEEP = f"nested deeper than {DEEPEST_VALUE} levels"


@dataclass(frozen=True)
class CodeTests:
    """The tests of one problem. Making one raises ValueError if there are none or they could not be run."""

    inputs: list[Any]
    outputs: list[Any]
    function: str | None = None
    time_limit: float | None = None
    """Seconds a test may take; None: the recipe's limit."""
    memory_mb: int | None = None
    """MiB a program may use if that is more than the recipe allows."""
    rules: Rules = "plain"
    """Set whose preamble, limits and equality apply (graders/code/rules.py)."""
    checker: str | None = None
    """Python program that decides, where several outputs are right (``judge``); of tests of stdin alone."""

    def __post_init__(self) -> None:
        names, plain = get_args(Rules), isinstance(self.checker, str) and self.function is None
        seconds, memory = self.time_limit, self.memory_mb
        # (field, what is expected, whether it holds)
        for name, wanted, holds in (
            ("inputs", "a list", isinstance(self.inputs, list)),
            ("outputs", "a list", isinstance(self.outputs, list)),
            ("function", "a name", self.function is None or _is_name(self.function)),
            ("checker", "a program, and no function", self.checker is None or plain),
            ("rules", f"one of {', '.join(names)}", isinstance(self.rules, str) and self.rules in names),
            ("time_limit", f"a number above 0, at most {LARGEST_TIME_LIMIT:g}",
             seconds is None or _is_number(seconds, LARGEST_TIME_LIMIT)),
            ("memory_mb", f"a whole number above 0, at most {LARGEST_MEMORY:g}",
             memory is None or (_is_number(memory, LARGEST_MEMORY) and memory == int(memory))),
        ):  # fmt: skip
            if not holds:
                raise ValueError(f"{name}: expected {wanted}, found {getattr(self, name)!r:.80}")
        if not self.inputs:
            raise ValueError("expected at least one test, found none")
        if len(self.inputs) != len(self.outputs):
            raise ValueError(f"{len(self.inputs)} inputs, but {len(self.outputs)} outputs")
        for number, (given, expected) in enumerate(zip(self.inputs, self.outputs, strict=True)):
            if self.function is None and not (isinstance(given, str) and isinstance(expected, str)):
                raise ValueError(f"test {number}: expected the text of stdin and stdout")
            if self.function is not None and not isinstance(given, list):
                raise ValueError(f"test {number}: expected the list of {self.function}'s arguments")
        # JSON of deeper values would end the program's parser or ours in a RecursionError.
        if self.function is not None and _is_deeper(self.inputs + self.outputs, DEEPEST_VALUE):
            raise ValueError(TOO_DEEP)
        if self.largest_output > LARGEST_OUTPUT:
            number = max(range(len(self.outputs)), key=self._output_bytes)
            expected = f"an output of at most {LARGEST_OUTPUT} bytes"
            raise ValueError(f"test {number}: expected {expected}, found {self.largest_output}")

    @cached_property
    def largest_output(self) -> int:
        """Bytes of the longest expected output, or of the longest expected value as JSON."""
        return max(map(self._output_bytes, range(len(self.outputs))))

    def _output_bytes(self, number: int) -> int:
        expected = self.outputs[number]
        return len((expected if self.function is None else json.dumps(expected)).encode(errors="replace"))

    @classmethod
    def from_json(cls, text: str) -> CodeTests:
        """Parse tests. Raises ValueError if ``text`` does not hold tests."""
        try:
            return cls.from_fields(json.loads(text))
        except RecursionError:
            raise ValueError(TOO_DEEP) from None

    @classmethod
    def from_fields(cls, fields: Any) -> CodeTests:
        """Return the tests in an object that ``to_json`` writes. Raises ValueError if it holds none."""
        if not isinstance(fields, dict):
            raise ValueError(f"expected an object of tests, found {type(fields).__name__}")
        names = cls.__dataclass_fields__
        if unknown := [name for name in fields if name not in names]:
            raise ValueError(f"unknown {unknown}; expected {list(names)}")
        held: dict[str, Any] = {"inputs": None, "outputs": None} | fields
        return cls(**held)

    def to_json(self) -> str:
        held = {name: getattr(self, name) for name in self.__dataclass_fields__}
        # Fields at their default are left out, so that golds stay short.
        return json.dumps({name: value for name, value in held.items() if value not in (None, "plain")})

    def stdin(self, number: int) -> str:
        """Return the stdin of a test: the text, or one JSON argument a line."""
        given = self.inputs[number]
        return given if self.function is None else "\n".join(json.dumps(argument) for argument in given)

    def is_right(self, number: int, stdout: str, result: str | None) -> bool:
        """Return True if printed text, or the function's result (JSON or None), passes the test."""
        expected = self.outputs[number]
        if self.function is None:
            return same_output(stdout, expected, self.rules == "apps")
        # APPS wraps some values in a list
        wrapped = expected[:1] if self.rules == "apps" and isinstance(expected, list) else []
        return result is not None and any(_is_json_of(result, value) for value in (expected, *wrapped))


ABSOLUTE, RELATIVE = Decimal("1e-8"), Decimal("1e-5")
"""Tolerance of APPS's checker."""


def same_output(printed: str, expected: str, close: bool = False) -> bool:
    """Compare outputs by LiveCodeBench's rule: as many lines, each equal as text, or token by token as
    decimal numbers; with ``close`` as ``numpy.allclose``, like APPS's checker. So 3.0 equals 3, but 0.3000001
    is not 0.3 and ``Yes`` is not ``YES``. White space around a line is ignored."""
    printed, expected = printed.strip(), expected.strip()
    return printed.count("\n") == expected.count("\n") and all(
        line == want or _same_numbers(line, want, close)
        for line, want in zip(_lines(printed), _lines(expected), strict=True)
    )


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.split("\n")]


def _same_numbers(line: str, want: str, close: bool) -> bool:
    """Compare token by token, so that a line of millions ends with the first difference."""
    tokens = (token[0] for token in re.finditer(r"\S+", line))
    # One list shorter than the other gives "", which is no number.
    pairs = (map(Decimal, pair) for pair in zip_longest(tokens, want.split(), fillvalue=""))
    try:
        return all(
            a == b or (close and b.is_finite() and abs(a - b) <= ABSOLUTE + RELATIVE * abs(b))
            for a, b in pairs
        )
    except ArithmeticError:  # no numbers, or too large to subtract
        return False


def _is_json_of(text: str, value: Any) -> bool:
    """Return True if ``text`` is the JSON of ``value``. A text with other numbers of parts is not parsed."""
    wanted = json.dumps(value)
    # Counting signs is cheap; parsing a program's text of any size is not.
    if any(text.count(mark) != wanted.count(mark) for mark in "[{,"):
        return False
    try:
        return json.loads(text) == value
    except (ValueError, RecursionError):
        return False


def _is_deeper(box: Any, levels: int) -> bool:
    parts = box.values() if isinstance(box, dict) else box
    return levels == 0 or any(_is_deeper(part, levels - 1) for part in parts if isinstance(part, list | dict))


def _is_name(value: Any) -> bool:
    plain = isinstance(value, str) and value.isidentifier() and not iskeyword(value)
    return plain and len(value) <= LONGEST_NAME


def _is_number(value: Any, largest: float) -> bool:
    return type(value) in (int, float) and 0 < value <= largest
