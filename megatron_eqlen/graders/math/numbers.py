"""Compare expressions by their numbers. Numbers too large to compute are compared as they are written."""

from __future__ import annotations

from typing import Any

import mpmath
from sympy import Eq, Expr, Float, Integer, Pow, Rational, binomial, factorial, simplify, solve
from sympy.core.function import AppliedUndef
from sympy.logic.boolalg import BooleanAtom

DIGITS = 15
LARGEST_BITS = 1 << 20
"""A number of more bits is never computed: it is compared as it is written."""
MOST_DIGITS = 300
"""Exact numbers that agree in so many digits are not known to differ."""
INTEGERS = frozenset("kmnKMN")
"""Symbols whose values are integers."""
SIZES = ((3, Rational(3, 11)), (4, Rational(17, 3)), (7, Rational(40, 3)))
"""Values of the first symbol, as an integer and as another number; further symbols have larger ones."""


def number_of(value: Any, point: dict[Any, Any] | None = None) -> Any:
    """Return the number (mpmath.mpc) that ``value`` is at ``point``, of any size; None if it is none."""
    if not isinstance(value, Expr) or value.is_Matrix or is_huge(value) or (not point and value.free_symbols):
        return None
    try:
        number = mpmath.mpc((value.subs(point) if point else value).evalf(DIGITS)._to_mpmath(53))
    except (TypeError, ValueError, OverflowError, AttributeError, ZeroDivisionError):
        return None
    return number if mpmath.isfinite(number) else None


def is_huge(value: Any) -> bool:
    """Return True if ``value`` holds a number of more than LARGEST_BITS bits, not yet computed."""
    return isinstance(value, Expr) and _bits(value) > LARGEST_BITS


def _bits(value: Expr) -> float:
    """Return about how many bits the largest number in ``value`` has."""
    if not value.args:
        return abs(value.p).bit_length() if isinstance(value, Integer) else 64.0
    bits = [_bits(arg) for arg in value.args if isinstance(arg, Expr)]
    largest = max(bits, default=64.0)
    if not isinstance(value, Pow | factorial | binomial) or value.free_symbols or largest > LARGEST_BITS:
        return largest
    # ``9^{99}``: bits of 9 times 99; n! of n has about 64 n bits at most here.
    grows_with = value.exp if isinstance(value, Pow) else value.args[0]
    size = abs(number_of(grows_with) or 0)
    return float(max(largest, size * (bits[0] if isinstance(value, Pow) else 64)))


def as_written(value: Any) -> Any:
    """Return a huge expression as nested tuples: small parts computed, sums and products without order."""
    if not is_huge(value):
        return value.doit()
    parts = [as_written(arg) for arg in value.args]
    # ``hash`` gives sums and products one order, since equal parts have equal hashes.
    return (value.func, *(sorted(parts, key=hash) if value.is_Add or value.is_Mul else parts))


def has_decimals(*values: Any) -> bool:
    return any(value.has(Float) for value in values)


def surely_different(gold: Any, answer: Any) -> bool:
    """Return True if both are expressions that differ at one point of their symbols; False: not known. Most
    wrong answers end here, at a tenth of the cost of ``simplify``, and those too close for math-verify."""
    if not (isinstance(gold, Expr) and isinstance(answer, Expr)):
        return False
    symbols = sorted(gold.free_symbols | answer.free_symbols, key=str)
    # At the first point complex numbers count, too; without symbols one point suffices.
    return any(
        _differ(gold, answer, _point(symbols, number), real=number > 0)
        for number in range(len(SIZES) if symbols else 1)
    )


def _point(symbols: list[Any], number: int) -> dict[Any, Any]:
    integer, size = SIZES[number]
    return {
        symbol: integer + n if str(symbol) in INTEGERS else size + Rational(n, 7 * n + 11)
        for n, symbol in enumerate(symbols)
    }


def _differ(gold: Expr, answer: Expr, point: dict[Any, Any], real: bool) -> bool:
    """Return True if two expressions have different numbers at ``point``; with ``real``, only if both are
    real: elsewhere ``\\ln(1+x)-\\ln(1-x)`` shows another branch."""
    here, there = number_of(gold, point), number_of(answer, point)
    if here is None or there is None or (real and (here.imag or there.imag)):
        return False
    # Far apart: different. Close together: computed to more digits, if the numbers are exact.
    if abs(here - there) > 1e-3 * max(1, abs(here), abs(there)):
        return True
    if has_decimals(gold, answer):
        return False
    try:
        parts = (gold - answer).subs(point).doit().evalf(DIGITS, maxn=MOST_DIGITS).as_real_imag()
    except (TypeError, ValueError, OverflowError, AttributeError, ZeroDivisionError):
        return False
    # A precision of 1 bit means that the digits did not suffice to tell the difference from 0.
    return any(part.is_Number and part != 0 and getattr(part, "_prec", 2) > 1 for part in parts)


def is_statement(equation: Any) -> bool:
    """Return True if an equation has no solutions to compare: always true or false, or about matrices."""
    sides: tuple[Any, ...] = equation.args if isinstance(equation, Eq) else ()
    if not sides or any(side.is_Matrix for side in sides):
        return bool(sides) or isinstance(equation, BooleanAtom)
    try:
        return simplify(sides[0] - sides[1]) == 0
    except (TypeError, ValueError, AttributeError):
        return False


def same_without_solutions(gold: Any, answer: Any) -> bool:
    """Return True if one ``Eq`` is a multiple of the other, or has a real solution to compare."""
    try:
        ratio = simplify((gold.lhs - gold.rhs) / (answer.lhs - answer.rhs))
        is_multiple = ratio.is_number and ratio.is_finite and ratio != 0
        return bool(is_multiple) or (not gold.atoms(AppliedUndef) and solve(gold, *gold.free_symbols) != [])
    except (TypeError, ValueError, AttributeError, NotImplementedError, ZeroDivisionError):
        return True
