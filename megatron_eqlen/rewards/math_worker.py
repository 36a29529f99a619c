r"""Runs inside a math grader's worker: compares two normal forms. It has no time limit of its own.

    lists and tuples: member by member ──► claims ``x = 6 \cdot 7 = 42``: true, then the last term
    ──► values: math-verify reads and compares

The structure of an answer is taken from its text, because math-verify reads ``(3,1)`` as a set and
``41=42`` as 42. Values are compared exactly; only a decimal is compared as math-verify does, to six places.

ANTLR's two-stage parse (first SLL, full LL where that fails) makes reading LaTeX 5 times faster; by ANTLR's
own guarantee a parse that SLL completes is the one LL would give.
"""

from __future__ import annotations

import logging
import re
import resource
import sys
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import mpmath
from antlr4 import PredictionMode
from antlr4.error.ErrorListener import ErrorListener
from latex2sympy2_extended import NormalizationConfig, normalize_latex
from latex2sympy2_extended.latex2sympy2 import ConversionConfig, _Latex2Sympy
from math_verify import verify
from sympy import Expr, Float, I, Integer, Pow, Rational, Set, Symbol, Union, binomial, factorial

MEMORY_BYTES = 3 << 30
"""Address space of a worker: ``9^{9^{9^9}}`` must not use up the machine's memory."""

DIGITS = 15
LARGEST_BITS = 1 << 20
"""A number of more bits is never computed: it is compared as it is written."""
DECIMAL_ERROR = 5e-4
"""A decimal has six correct places, and three correct digits: 0.00000002 is not 10^{-8}."""
CLEAN_UP = NormalizationConfig(
    basic_latex=True, units=False, malformed_operators=True, nits=False, boxed="none"
)
"""We handle units ourselves: the library reads the variable in ``2m`` as metres."""
READING = ConversionConfig(interpret_as_mixed_fractions=False, lowercase_symbols=False)
"""Mixed numbers were already written as sums."""
WARM_UP = (
    r"\frac{1}{2}",
    r"-\frac{\pi}{12}+1",
    r"12\sqrt{3}",
    "x^{2}+12x-5",
    r"\pi r^{2}",
    "0.25",
    r"\text{yes}",
    r"e^{12}",
    r"\ln 12",
    r"\sin{x}",
    r"\frac{x+1}{2y}",
    "x=12",
    "x>3",
    r"x\in[0,1)",
    r"(3,\infty)",
    r"2^{n}\cdot 3",
    r"\frac{n(n+1)}{2}",
    r"\begin{pmatrix}1&2\\3&4\end{pmatrix}",
)

logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # it warns that its own timers are off


class FullContextNeeded(Exception):
    """SLL could not read it."""


class _Refuse(ErrorListener):
    def syntaxError(self, *args: Any) -> None:
        raise FullContextNeeded


_create_full_parser = _Latex2Sympy.create_parser


def create_two_stage_parser(self: _Latex2Sympy, latex: str) -> Any:
    """The library's parser, whose ``math`` rule tries SLL first."""
    parser = _create_full_parser(self, latex)
    parser.removeErrorListeners()
    parser.addErrorListener(_Refuse())
    parser._interp.predictionMode = PredictionMode.SLL
    first_stage = parser.math

    def math() -> Any:
        try:
            return first_stage()
        except FullContextNeeded:
            return _create_full_parser(self, latex).math()

    parser.math = math
    return parser


_Latex2Sympy.create_parser = create_two_stage_parser


# --- reading


@lru_cache(maxsize=4096)
def read(text: str, is_complex: bool = False) -> Any:
    """The SymPy object of a normal form without units; None if math-verify cannot read it."""
    if _TWO_NUMBERS.search(text):
        return None  # the library would add or multiply them
    if r"\lor" in text:
        return _read_union(text.split(r"\lor"), is_complex)
    try:
        parser = _Latex2Sympy(is_real=not is_complex, config=READING)
        value = parser.parse(normalize_latex(_PRODUCT.sub(r"\\cdot ", text), CLEAN_UP))
        return value.xreplace({Symbol("i", real=False): I}) if is_complex else value
    except Exception:  # noqa: BLE001  the library raises what it likes on text that is no mathematics
        return None


def _read_union(conditions: list[str], is_complex: bool) -> Set | None:
    parts = [read(condition, is_complex) for condition in conditions]
    try:
        return Union(*(part if isinstance(part, Set) else part.as_set() for part in parts))
    except (AttributeError, NotImplementedError, TypeError, ValueError):
        return None


# --- structure

_PRODUCT = re.compile(r"(?<=\d)(?=\(|\\(?:binom|frac))")
"""Where the library would wrongly read a mixed number, for example ``2(3)`` as 5."""
_TWO_NUMBERS = re.compile(r"\d \d")
_BRACKETS = r"\\?[{(\[]|\\?[)}\]]"
_GROUP = re.compile(r"(\\\{|[(\[])(.*)(\\\}|[)\]])", re.DOTALL)
_EQUALS = r"(?<![<>!:\\])="
_APPROXIMATELY = r"\\approx(?![A-Za-z])"
_SET = re.compile(r"[<>]|\\(?:le|ge|ne|in|notin|subset|cup|cap|setminus|lor|emptyset|mathbb)(?![A-Za-z])")
_NAME = re.compile(
    r"\\?[A-Za-z]'*(?:_\{\w+\})?(?:\([\w,]+\))?"
    r"|\\(?!pi|infty|emptyset)[A-Za-z]+(?:_\{\w+\})?|\\(?:vec|hat|bar|tilde|overline)\{\w+\}"
)
_TEXT = re.compile(r"\\text\{(.*?)\}")
_OBJECT = re.compile(
    r"\\(?:mathbb|mathcal|mathfrak|mathscr|aleph|oplus|otimes|[rl]times|cong|simeq|text)(?![A-Za-z])"
)
_IMAGINARY = re.compile(r"(?<![A-Za-z\\])i(?![A-Za-z])")


@lru_cache(maxsize=4096)
def split(text: str, separator: str) -> list[str]:
    """``text`` cut where ``separator``, a regular expression, stands outside all brackets."""
    parts, depth, start = [], 0, 0
    for match in re.finditer(rf"(?P<cut>{separator})|{_BRACKETS}", text):
        if match["cut"] is None:
            depth += 1 if match.group()[-1] in "([{" else -1
        elif depth == 0:
            parts.append(text[start : match.start()])
            start = match.end()
    return [*parts, text[start:]]


@lru_cache(maxsize=4096)
def members(text: str) -> tuple[str, list[str]]:
    r"""The brackets around a list, ``()`` or ``\{\}`` for example, and its members.

    For a list without brackets, and for a single value (a list of one), the brackets are "".
    """
    group = _GROUP.fullmatch(text)
    if group and _is_balanced(group[2]):
        inside = split(group[2], ",")
        if len(inside) > 1 or group[1] == r"\{":
            return group[1] + group[3], [sign for part in inside for sign in _signs(part)]
    return "", [sign for part in split(text, ",") for sign in _signs(part)]


def _is_balanced(text: str) -> bool:
    depth = 0
    for match in re.finditer(_BRACKETS, text):
        depth += 1 if match.group()[-1] in "([{" else -1
        if depth < 0:
            return False
    return depth == 0


def _signs(text: str) -> list[str]:
    r"""Both values of ``1 \pm 2``."""
    if text.count(r"\pm") != 1:
        return [text]
    return [text.replace(r"\pm", sign).removeprefix("+") for sign in "+-"]


# --- equality, from the whole to its parts


def equal(gold: str, answer: str, is_complex: bool = False) -> bool:
    """Whether ``answer``, a normal form without unit, means the same as ``gold``."""
    if gold == answer:
        return True
    if gold.endswith(r"\%") or answer.endswith(r"\%"):
        return _equal_percentages(gold, answer, is_complex)
    if len(split(answer, ",")) == 1:
        if len(split(gold, _EQUALS)) > 1 and len(split(gold, ",")) == 1:
            return _equal_equations(gold, answer, is_complex)
        candidates = _conclusions(answer, gold, is_complex)
        if candidates != [answer]:
            return any(equal(gold, candidate, is_complex) for candidate in candidates)
    (_, wanted), (_, found) = members(gold), members(answer)
    if min(len(wanted), len(found)) == 1 and (_SET.search(gold) or _SET.search(answer)):
        return _equal_values(gold, answer, is_complex)
    return _equal_lists(gold, answer, is_complex)


def _equal_percentages(gold: str, answer: str, is_complex: bool) -> bool:
    """As in math-verify, 50% is 50 and 0.5: a question may ask for either."""
    numbers = [text.removesuffix(r"\%") for text in (gold, answer)]
    if equal(*numbers, is_complex):
        return True
    hundredths = [
        number if number == text else rf"\frac{{{number}}}{{100}}"
        for number, text in zip(numbers, (gold, answer), strict=True)
    ]
    return numbers != hundredths and equal(*hundredths, is_complex)


def _equal_lists(gold: str, answer: str, is_complex: bool) -> bool:
    (brackets, wanted), (others, found) = members(gold), members(answer)
    if len(wanted) == len(found) == 1 and not (brackets == others == r"\{\}"):
        return _equal_values(wanted[0], found[0], is_complex)
    if len(wanted) != len(found):
        return False
    if brackets in ("", r"\{\}") and others in ("", r"\{\}"):
        return _same_members(wanted, found, is_complex)
    if brackets != others and {brackets, others} != {"", "()"}:
        return False
    return all(equal(one, other, is_complex) for one, other in zip(wanted, found, strict=True))


def _same_members(wanted: list[str], found: list[str], is_complex: bool) -> bool:
    """In any order, each once."""
    left = list(found)
    for one in wanted:
        match = next((other for other in left if equal(one, other, is_complex)), None)
        if match is None:
            return False
        left.remove(match)
    return True


def _equal_equations(gold: str, answer: str, is_complex: bool) -> bool:
    """The gold is an equation: the answer is it in another form, or the value that it gives a name."""
    wanted, found = split(gold, _EQUALS), split(answer, _EQUALS)
    if len(found) == 1:
        values = [wanted[-1]] * bool(_NAME.fullmatch(wanted[0])) + [wanted[0]] * bool(
            _NAME.fullmatch(wanted[-1])
        )
        return any(equal(value, answer, is_complex) for value in values)
    if not _is_true(found, is_complex):
        return False
    return _equal_values(f"{wanted[0]}={wanted[-1]}", f"{found[0]}={found[-1]}", is_complex)


def _conclusions(answer: str, gold: str, is_complex: bool) -> list[str]:
    """The values an answer may be read as: of a chain of equations its end, if no link is false."""
    exact, *roundings = split(answer, _APPROXIMATELY)
    terms = split(exact, _EQUALS)
    if len(terms) + len(roundings) == 1:
        return [answer]
    value = terms[0] if _NAME.fullmatch(terms[-1]) and not _NAME.fullmatch(gold) else terms[-1]
    if not _is_true(terms, is_complex):
        return []
    if roundings and _NAME.fullmatch(value):
        return roundings[-1:]
    return [value, *roundings] if all(_rounds_to(value, one, is_complex) for one in roundings) else []


def _is_true(terms: list[str], is_complex: bool) -> bool:
    """Are the numbers among ``terms`` equal?"""
    numbers = [term for term in terms if _number(read(term, is_complex)) is not None]
    return all(_equal_values(numbers[0], other, is_complex) for other in numbers[1:])


def _rounds_to(value: str, rounding: str, is_complex: bool) -> bool:
    exact, near = _number(read(value, is_complex)), _number(read(rounding, is_complex))
    decimals = len(rounding.partition(".")[2])
    return exact is not None and near is not None and abs(exact - near) <= 0.51 * 10.0**-decimals


def _equal_values(gold: str, answer: str, is_complex: bool) -> bool:
    """Are two expressions, relations or sets equal? What math-verify says, made exact."""
    if sorted(_TEXT.findall(gold)) != sorted(_TEXT.findall(answer)):
        return False  # words are no products of their letters
    wanted, found = read(gold, is_complex), read(answer, is_complex)
    if wanted is None or found is None:
        return False
    if is_huge(wanted) or is_huge(found):
        return as_written(wanted) == as_written(found)
    if surely_different(wanted, found):
        return False
    if _verify(_exact(wanted), _exact(found)):
        return True
    return _has_decimals(wanted, found) and _verify(wanted, found) and not _only_both_small(wanted, found)


def _verify(gold: Any, answer: Any) -> bool:
    return verify(gold, answer, timeout_seconds=None, allow_set_relation_comp=True)


def _has_decimals(*values: Any) -> bool:
    return any(value.has(Float) for value in values)


def _exact(value: Any) -> Any:
    """``value`` with its decimals as the fractions they are written as."""
    if not _has_decimals(value):
        return value
    return value.xreplace({decimal: Rational(str(decimal)) for decimal in value.atoms(Float)})


def surely_different(gold: Any, answer: Any) -> bool:
    """Both are expressions that differ at one point of their symbols: no simplification can make them equal.

    Most wrong answers are found here, at a tenth of the cost of SymPy's ``simplify``. False means: not known.
    """
    if not (isinstance(gold, Expr) and isinstance(answer, Expr)):
        return False
    if gold.is_Symbol or answer.is_Symbol:
        return False  # names compare as text
    symbols = sorted(gold.free_symbols | answer.free_symbols, key=str)
    point = {symbol: Rational(2 * number + 3, 7 * number + 11) for number, symbol in enumerate(symbols)}
    here, there = _number(gold, point), _number(answer, point)
    return (
        here is not None
        and there is not None
        and bool(abs(here - there) > 1e-3 * max(1, abs(here), abs(there)))
    )


def _only_both_small(gold: Any, answer: Any) -> bool:
    """Whether two numbers differ, though math-verify, which rounds decimals to six places, takes them for
    equal."""
    here, there = _number(gold), _number(answer)
    return here is not None and there is not None and abs(here - there) > DECIMAL_ERROR * abs(here)


def _number(value: Any, point: dict[Symbol, Rational] | None = None) -> mpmath.mpc | None:
    """The number that ``value`` is (at ``point``), of any size; None if it is none."""
    if not isinstance(value, Expr) or is_huge(value) or (not point and value.free_symbols):
        return None
    try:
        number = mpmath.mpc((value.subs(point) if point else value).evalf(DIGITS)._to_mpmath(53))
    except (TypeError, ValueError, OverflowError, AttributeError, ZeroDivisionError):
        return None
    return number if mpmath.isfinite(number) else None


# --- numbers too large to compute


def is_huge(value: Any) -> bool:
    """Does it hold a number of more than LARGEST_BITS bits, not yet computed?"""
    return isinstance(value, Expr) and _bits(value) > LARGEST_BITS


def _bits(value: Expr) -> float:
    """About how many bits the largest number in ``value`` has."""
    if not value.args:
        return abs(value.p).bit_length() if isinstance(value, Integer) else 64.0
    bits = [_bits(arg) for arg in value.args if isinstance(arg, Expr)]
    largest = max(bits, default=64.0)
    if not isinstance(value, Pow | factorial | binomial) or value.free_symbols or largest > LARGEST_BITS:
        return largest
    grows_with = value.exp if isinstance(value, Pow) else value.args[0]
    size = abs(_number(grows_with) or 0)
    return float(max(largest, size * (bits[0] if isinstance(value, Pow) else 64)))


def as_written(value: Any) -> Any:
    """A huge expression as nested tuples: small parts computed, sums and products without order."""
    if not is_huge(value):
        return value.doit()
    parts = [as_written(arg) for arg in value.args]
    return (value.func, *(sorted(parts, key=hash) if value.is_Add or value.is_Mul else parts))


# --- the worker


def compare(item: dict[str, str]) -> dict[str, bool]:
    """``correct``: the answer equals the gold; ``parsed``: the answer is mathematics, not only text."""
    gold, answer = item["gold"], item["answer"]
    is_complex = bool(_IMAGINARY.search(gold) or _IMAGINARY.search(answer))
    return {
        "correct": equal(gold, answer, is_complex),
        "parsed": is_readable(answer, is_complex),
        "gold_parsed": is_readable(gold, is_complex) or is_name(gold),
    }


def is_readable(text: str, is_complex: bool) -> bool:
    """Can all its members be read?"""
    return all(read(member, is_complex) is not None for member in members(text)[1]) or (
        read(text, is_complex) is not None
    )


def is_name(text: str) -> bool:
    r"""Does it name an object that is no number, ``\mathbb{Z}/2\mathbb{Z}``? Names are compared as texts."""
    return bool(_OBJECT.search(text)) and _is_balanced(text)


def make_handler() -> Callable[[dict[str, str]], dict[str, bool]]:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sys.set_int_max_str_digits(0)  # exact integers of any size; the grader's time limit bounds them
    return compare


for _answer in WARM_UP:  # once in the host: workers are forked with the parser's tables filled
    compare({"gold": _answer, "answer": _answer + "+1"})
