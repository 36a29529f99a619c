r"""The tests of a code problem, as they travel in ``Prompt.gold``, and when an output is right.

``{"inputs": [...], "outputs": [...], "function": name or absent, ...}``. Without ``function`` a test is
the text of stdin and the expected text of stdout; with it an input is the list of arguments and an output
the value::

    {"inputs": ["2 3\n"], "outputs": ["5\n"]}
    {"inputs": [[2, 3]], "outputs": [5], "function": "add"}
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from decimal import Decimal, InvalidOperation
from typing import Any


@dataclass(frozen=True)
class CodeTests:
    inputs: list[Any]
    outputs: list[Any]
    function: str | None = None
    wrapped: bool = False
    """APPS and TACO may wrap a function's value in a list: its first element is right too."""
    time_limit: float | None = None
    """Seconds a test may take; None: the recipe's."""
    memory_mb: int | None = None

    def __post_init__(self) -> None:
        if not self.inputs:
            raise ValueError("expected at least one test, found none")
        if len(self.inputs) != len(self.outputs):
            raise ValueError(f"{len(self.inputs)} inputs, but {len(self.outputs)} outputs")
        for number, (given, expected) in enumerate(zip(self.inputs, self.outputs, strict=True)):
            if self.function is None and not (isinstance(given, str) and isinstance(expected, str)):
                raise ValueError(f"test {number}: expected the text of stdin and stdout")
            if self.function is not None and not isinstance(given, list):
                raise ValueError(f"test {number}: expected the list of {self.function}'s arguments")

    @classmethod
    def from_json(cls, text: str) -> CodeTests:
        """Raises ValueError if ``text`` does not hold tests."""
        fields = json.loads(text)
        if not isinstance(fields, dict):
            raise ValueError(f"expected an object of tests, found {type(fields).__name__}")
        names = cls.__dataclass_fields__
        if unknown := [name for name in fields if name not in names]:
            raise ValueError(f"unknown {unknown}; expected {list(names)}")
        for name in ("inputs", "outputs"):
            if not isinstance(fields.get(name), list):
                raise ValueError(f"{name}: expected a list, found {type(fields.get(name)).__name__}")
        return cls(**fields)

    def to_json(self) -> str:
        return json.dumps({name: value for name, value in asdict(self).items() if value not in (None, False)})

    def stdin(self, number: int) -> str:
        """What the program reads in a test: the text, or one JSON argument a line."""
        given = self.inputs[number]
        return given if self.function is None else "\n".join(json.dumps(argument) for argument in given)

    def is_right(self, number: int, stdout: str, result: str | None) -> bool:
        """Does what the program printed, or its function returned (JSON), pass the test?"""
        expected = self.outputs[number]
        if self.function is None:
            return same_output(stdout, expected)
        value = json.loads(result) if result is not None else None
        return value == expected or bool(
            self.wrapped and isinstance(expected, list) and expected and value == expected[0]
        )


def same_output(printed: str, expected: str) -> bool:
    """LiveCodeBench's rule: as many lines, and each equal as text, or token by token as decimal numbers.

    So 3.0 is 3, but 0.3000001 is not 0.3 and ``Yes`` is not ``YES``; space around a line does not count.
    """
    lines, wanted = _lines(printed), _lines(expected)
    return len(lines) == len(wanted) and all(
        line == want or _same_numbers(line, want) for line, want in zip(lines, wanted, strict=True)
    )


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.strip().split("\n")]


def _same_numbers(line: str, want: str) -> bool:
    tokens, wanted = line.split(), want.split()
    try:
        return len(tokens) == len(wanted) and all(
            Decimal(token) == Decimal(other) for token, other in zip(tokens, wanted, strict=True)
        )
    except InvalidOperation:
        return False
