"""LaTeX in normal form -> SymPy, with math-verify's parser."""

from __future__ import annotations

import re
from functools import lru_cache
from math import prod
from typing import Any
from zlib import crc32

from latex2sympy2_extended import NormalizationConfig, normalize_latex
from latex2sympy2_extended.latex2sympy2 import ConversionConfig, _Latex2Sympy
from sympy import Function, I, Intersection, Set, Symbol, Union, zeta

CLEAN_UP = NormalizationConfig(
    basic_latex=True, units=False, malformed_operators=True, nits=False, boxed="none"
)
"""The library's clean-up, without units: it reads the variable in ``2m`` as metres."""
READING = ConversionConfig(interpret_as_mixed_fractions=False, lowercase_symbols=False)
"""Mixed numbers were already written as sums."""
_HYPERBOLIC = {"coth": "tanh", "sech": "cosh", "csch": "sinh"}
"""Each function that the library cannot read, and its reciprocal."""


def _symbol(text: str) -> str:
    """Return a symbol that stands for an expression which the library cannot compute with."""
    return f"Q_{{{crc32(text.encode())}}}"


_D, _V, _N = r"(?:d|\\partial ?)", r"(?:\\[A-Za-z]+|[A-Za-z])", r"(?:\^\{\d\})?"
_REWRITES = (
    (
        r"(?:\\[gG]amma|[A-Za-z])_\{[^{}]*\}(?!\()|" + _V + r"\^\{\*\}|\\Gamma(?![A-Za-z(])|I"
        r"|(\\(?:math[a-z]+|hat|vec|bar|tilde|d?dot|overline)\{[^{}]*\}|\\[A-Za-z]+ ?)",
        lambda m: m[1] or _symbol(m[0]),
    ),
    (r"(\.\d+)?\\ldots ?", lambda m: m[1] or _symbol(m[0])),
    (r"\\(coth|sech|csch)((?:\^\{\w+\})?\([^()]*\))", lambda m: rf"(1/\{_HYPERBOLIC[m[1]]}{m[2]})"),
    (r"(?<![\d!.])(\d{1,3})!!", lambda m: str(prod(range(int(m[1]), 0, -2)))),
    (r"(?:[A-Za-z]|\([^()]*\))!!", lambda m: _symbol(m[0])),
    (r"\\(gcd|lcm)\(([^()]*[A-Za-z][^()]*)\)", lambda m: _symbol(m[1] + ",".join(sorted(m[2].split(","))))),
    (r"\\gamma(?!['(_A-Za-z])", r"(\\gamma)"),
    (rf"\\frac\{{{_D}{_N}{_V}(?:_\{{\w+\}})?\}}\{{{_D}{_V}{_N}\}}", lambda m: _symbol(m[0])),
    (rf"(?:{_V}|\d+)'+(?!\()|\\d?dot\{{{_V}\}}(?:_\{{\w+\}})?", lambda m: _symbol(m[0])),
    (r"(?<=\d)(?=\(|\\(?:binom|frac))", r"\\cdot "),
    (r"\\sqrt\[(\d*[13579])\]\{-(\d+|[A-Za-z])\}", r"(-\\sqrt[\1]{\2})"),
)
"""Spellings that the library misreads: ``I_1`` as the imaginary unit, ``E_0`` and ``v^*`` not at all, dots as
nothing, ``3!!`` as (3!)!, ``\\gcd(m,n)`` as 1, ``\\gamma+1`` and ``\\Gamma+1`` as gamma(1), ``2(3)`` as 5,
odd roots of negatives as complex, derivatives of unknown functions as 0 or without primes."""
_TWO_NUMBERS = re.compile(r"\d \d")


@lru_cache(maxsize=4096)
def read(text: str, is_complex: bool = False) -> Any:
    """Return the SymPy object of a normal form without units; None if math-verify cannot read it."""
    if _TWO_NUMBERS.search(text):
        return None  # the library would add or multiply them
    for word, join in ((r"\lor", Union), (r"\land", Intersection)):
        if word in text:
            return _read_joined(text.split(word), join, is_complex)
    try:
        parser = _Latex2Sympy(is_real=not is_complex, config=READING)
        for pattern, replacement in _REWRITES:
            text = re.sub(pattern, replacement, text)
        value: Any = parser.parse(normalize_latex(text, CLEAN_UP))
        value = value.xreplace({Symbol("i", real=False): I}) if is_complex else value
        return value.replace(Function(r"\zeta"), zeta) if r"\zeta(" in text else value
    except Exception:  # noqa: BLE001  the library raises what it likes on text that is no mathematics
        return None


def _read_joined(conditions: list[str], join: type[Set], is_complex: bool) -> Set | None:
    parts = [read(condition, is_complex) for condition in conditions]
    try:
        return join(*(part if isinstance(part, Set) else part.as_set() for part in parts))
    except (AttributeError, NotImplementedError, TypeError, ValueError):
        return None
