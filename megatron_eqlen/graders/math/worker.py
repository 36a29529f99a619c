r"""Compares two answers inside a math grader's worker. It has no time limit of its own.

    lists and tuples: member by member ──► claims ``x = 6 \cdot 7 = 42``: true, then the last term
    ──► values: math-verify reads and compares

An answer's structure is taken from its text, because math-verify reads ``(3,1)`` as a set and ``41=42`` as
42. Values are compared exactly; only a decimal is compared as math-verify does, to six places.
"""

from __future__ import annotations

import logging
import re
import resource
import sys
from collections.abc import Callable
from functools import lru_cache
from itertools import pairwise, product, repeat, zip_longest
from typing import Any

from math_verify import verify
from sympy import Eq, Expr, Float, Rational

from megatron_eqlen.graders.math import numbers
from megatron_eqlen.graders.math.match import compare_texts
from megatron_eqlen.graders.math.reading import read

MEMORY_BYTES = 3 << 30
"""Address space of a worker: ``9^{9^{9^9}}`` must not use up the machine's memory."""

DECIMAL_ERROR = 5e-4
"""A decimal has six correct places, and three correct digits: 0.00000002 is not 10^{-8}."""

logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # it warns that its own timers are off


# --- structure

_BRACKETS = r"\\?[{(\[]|\\?[)}\]]"
_GROUP = re.compile(r"(\\\{|[(\[])(.*)(\\\}|[)\]])", re.DOTALL)
_EQUALS = r"(?<![<>:\\])="
_APPROXIMATELY = r"\\approx(?![A-Za-z])"
_SET = re.compile(r"[<>]|\\(?:le|ge|ne|in|notin|subset|cup|cap|setminus|lor|emptyset|mathbb)(?![A-Za-z])")
_SYMBOL = (
    r"(?:(?:\\Delta ?)?\\?[A-Za-z]'*(?:_\{[^{}]+\})?(?:\^\{\*\})?(?:\([\w,]+\))?"
    r"|\\(?!pi|infty|emptyset)[A-Za-z]+(?:_\{\w+\})?|\\(?:vec|hat|bar|tilde|d?dot|overline)\{\w+\}"
    r"|(?:[A-Z]'*(?:_\{\w+\})?){2,})"  # a length, AB
)
_LENGTH = r"[A-Z]{2}(?:\^\{\d\})?"
# ``x``, ``f(x)``, ``(x,y)``, ``AB``, ``\angle ABC``, ``\frac{dy}{dx}``, ``\sin(A)``, ``\max(a,b)``
_NAME = re.compile(
    rf"{_SYMBOL}|{_SYMBOL}(?::{_SYMBOL})+|\({_SYMBOL}(?:,{_SYMBOL})+\)|[a-w](?:\+[a-w])+"
    rf"|\|[^|=+-]+\||\[[A-Z]+\]|\\(?:angle|triangle) ?[A-Z]+|{_SYMBOL}/{_SYMBOL}"
    rf"|{_LENGTH}(?:(?:\\cdot ?|[+-]){_LENGTH})*|\\(?:(?:var)?phi|tau|sigma|mu|pi)\(\w+\)"
    rf"|\\frac\{{(?:d|\\partial ?)?{_SYMBOL}\}}\{{(?:d|\\partial ?)?{_SYMBOL}\}}"
    r"|\\(?:sin|cos|tan|cot)\((?:\\[a-z]+|[A-Z])\)"
    r"|(?:[A-Z]|\\mathbb\{[A-Z]\}|\\text\{[^{}]*\}|[a-z]'*(?:\^\{[^{}]*\})?(?=\())(?:\([^()]*\)|\[[^\[\]]*\])?"
    r"|\\(?:dim|det|lim|max|min|sup|inf|gcd|lcm|deg|arg|int|sum|prod|ker)(?![A-Za-z]).+"
)
"""The left side of an equation that only names the value on the right."""
_FUNCTION = re.compile(r"[A-Za-z](?:\(([a-z])\))?")
_TOKEN = re.compile(r"\\[A-Za-z]+|[A-Za-z]")
_AMBIGUOUS = (
    (re.compile(r"\\log(?!_|[A-Za-z])"), (r"\\ln", r"\\log_{10}")),
    (re.compile(r"(?<![\w.}])(\d+)/(\d+)(?=\\?[A-Za-z])"), (r"\\frac{\1}{\2}", r"\1/\2")),
)
"""Spellings with two readings, of which gold and answer have the same: ``1/2x`` is x/2 or 1/(2x)."""
_TEXT = re.compile(r"\\text\{(.*?)\}")
_OBJECT = re.compile(
    r"\\(?:mathbb|mathcal|mathfrak|mathscr|aleph|oplus|otimes|[rl]times|cong|simeq|text)(?![A-Za-z])"
)
_IMAGINARY = re.compile(r"(?<![A-Za-z\\])i(?![A-Za-z])")
_INDEX = re.compile(r"\\(?:sum|prod|max|min|sup|inf|big(?:cup|cap))_\{i(?:=|\\in|[<}]|\\ge)")
"""An operator whose index is ``i``, which is no imaginary unit then."""


@lru_cache(maxsize=4096)
def split(text: str, separator: str) -> list[str]:
    """Return ``text`` cut where ``separator``, a regular expression, stands outside all brackets."""
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
    r"""Return the brackets around a list, ``()`` or ``\{\}`` for example, and its members. Without brackets,
    and for a single value (a list of one), the brackets are ""."""
    group = _GROUP.fullmatch(text)
    if group and _is_balanced(group[2]):
        inside = split(group[2], ",")
        # ``(1, \pm 2)`` is two tuples, not one with three members.
        if len(inside) > 1 and group[1] == "(" and r"\pm" in text:
            return "", _signs(text)
        if len(inside) > 1 or group[1] == r"\{":
            # ``[1,2,3]`` is no interval, but a tuple
            brackets = "()" if len(inside) > 2 and group[1] == "[" else group[1] + group[3]
            return brackets, [sign for part in inside for sign in _signs(part)]
    return "", [sign for part in split(text, ",") for sign in _signs(part)]


def _is_balanced(text: str) -> bool:
    depth = 0
    for match in re.finditer(_BRACKETS, text):
        depth += 1 if match.group()[-1] in "([{" else -1
        if depth < 0:
            return False
    return depth == 0


def _signs(text: str) -> list[str]:
    r"""Return both values of ``1 \pm 2``, all of ``(\pm 1, \pm 2)``."""
    group = _GROUP.fullmatch(text)
    if group and group[1] == "(" and r"\pm" in text and len(inside := split(group[2], ",")) > 1:
        return [f"({','.join(values)})" for values in product(*map(_signs, inside))]
    if text.count(r"\pm") != 1:
        return [text]
    return [text.replace(r"\pm", sign).removeprefix("+") for sign in "+-"]


# --- equality, from the whole to its parts


def equal(gold: str, answer: str, is_complex: bool = False) -> bool:
    """Return True if ``answer``, a normal form without unit, means the same as ``gold``."""
    if gold == answer:
        return True
    # ``x=1,y=2`` against ``y=2,x=1``, ``(x,y)=(1,2)`` or ``(1,2)``.
    if (named := _without_names(gold, answer)) is not None:
        return equal(*named, is_complex) if named else False
    is_chain = len(split(answer, f"{_EQUALS}|{_APPROXIMATELY}")) > 1
    if (gold.endswith(r"\%") or answer.endswith(r"\%")) and not is_chain:
        return _equal_percentages(gold, answer, is_complex)
    # An equation, or a chain such as ``x = 2 \cdot 3 = 6``, of which the end counts.
    if len(split(answer, ",")) == 1:
        if len(split(gold, _EQUALS)) > 1 and len(split(gold, ",")) == 1:
            return _equal_equations(gold, answer, is_complex)
        candidates = _conclusions(answer, gold, is_complex)
        if candidates != [answer]:
            return any(equal(gold, candidate, is_complex) for candidate in candidates)
    (_, wanted), (_, given) = members(gold), members(answer)
    # An interval or a union of some has commas of its own, and is one value.
    if min(len(wanted), len(given)) == 1 and (_SET.search(gold) or _SET.search(answer)):
        return _equal_values(gold, answer, is_complex)
    return _equal_lists(gold, answer, is_complex)


def _without_names(gold: str, answer: str) -> tuple[str, str] | tuple[()] | None:
    r"""Write lists of named values as tuples: ``x=1,y=2`` as ``(1,2)``, in the order of the names, or the
    gold's if the answer is a bare list. Return None if neither names several values, () if they differ."""
    wanted, given = _assignments(gold), _assignments(answer)
    names, values = wanted or given or ([], [])
    order = sorted(set(names))
    if wanted and given:
        same = order == sorted(set(given[0]))
        return (_tuples(*wanted, order), _tuples(*given, order)) if same else ()
    if not names:
        return None
    other = answer if wanted else gold
    sides = [split(part, _EQUALS) for part in split(other, ",")]
    # ``x=2,x=1`` beside ``x_{1}=1,x_{2}=2``: values of one name, in any order
    if {(side[0], len(side)) for side in sides} == {(name.partition("_")[0], 2) for name in names}:
        return ",".join(values), ",".join(value for _, value in sides)
    if any(len(side) > 1 for side in sides):
        return None  # other names, or some of them
    # ``1,2`` beside ``x=1,y=2`` is one solution: read as ``(1,2)``.
    if len(names) == len(order) == len(sides):
        other = f"({other})"
        order = names if wanted else order
    return (_tuples(names, values, order), other) if wanted else (other, _tuples(names, values, order))


def _assignments(text: str) -> tuple[list[str], list[str]] | None:
    r"""Return names and values of ``x=1,y=2``, ``(x,y)=(1,2)`` and several such; None for anything else."""
    sides = [split(part, _EQUALS) for part in split(text, ",")]
    # ``(x,y)=(1,2)`` is ``x=1,y=2``.
    if len(sides) == 1 and len(sides[0]) == 2:
        (left, names), (right, values) = map(members, sides[0])
        if left == right == "()" and len(names) == len(values):
            sides = list(map(list, zip(names, values, strict=True)))
    names = [side[0] for side in sides]
    # ``x=1,y=2,x=3,y=4``: the names repeat in one order, for two solutions.
    cycle = len(set(names))
    if cycle < 2 or any(len(side) != 2 or not _NAME.fullmatch(side[0]) for side in sides):
        return None
    return (names, [side[1] for side in sides]) if names == names[:cycle] * (len(names) // cycle) else None


def _tuples(names: list[str], values: list[str], order: list[str]) -> str:
    """Return the values of each solution in the given order of their names."""
    size = len(order)
    solutions = [
        dict(zip(names[at : at + size], values[at : at + size], strict=True))
        for at in range(0, len(names), size)
    ]
    return ",".join(f"({','.join(solution[name] for name in order)})" for solution in solutions)


def _equal_percentages(gold: str, answer: str, is_complex: bool) -> bool:
    """Compare percentages: as in math-verify, 50% is 50 and 0.5, because a question may ask for either."""
    plain = gold.removesuffix(r"\%"), answer.removesuffix(r"\%")
    return equal(*plain, is_complex) or equal(_hundredths(gold), _hundredths(answer), is_complex)


def _hundredths(text: str) -> str:
    """Return a percentage as a number of hundredths; any other number unchanged."""
    return rf"\frac{{{text[:-2]}}}{{100}}" if text.endswith(r"\%") else text


def _equal_lists(gold: str, answer: str, is_complex: bool) -> bool:
    (brackets, wanted), (others, given) = members(gold), members(answer)
    if len(wanted) == len(given) == 1 and not (brackets == others == r"\{\}"):
        return _equal_values(wanted[0], given[0], is_complex)
    # Sets, and lists without brackets: neither order nor repetition counts.
    if brackets in ("", r"\{\}") and others in ("", r"\{\}") and len(wanted) > 1 < len(given):
        return _same_members(wanted, given, is_complex) and _same_members(given, wanted, is_complex)
    # A tuple may have lost its parentheses; other brackets must agree.
    if len(wanted) != len(given) or (brackets != others and {brackets, others} != {"", "()"}):
        return False
    return all(equal(value, other, is_complex) for value, other in zip(wanted, given, strict=True))


def _same_members(wanted: list[str], given: list[str], is_complex: bool) -> bool:
    return all(any(equal(value, other, is_complex) for other in given) for value in wanted)


def _equal_equations(gold: str, answer: str, is_complex: bool) -> bool:
    """Compare with a gold that is an equation or a chain of them."""
    wanted, given = split(gold, _EQUALS), split(answer, _EQUALS)
    # ``x=5`` or ``5=x``, answered by 5.
    if len(given) == 1:
        sides = (wanted[0], wanted[-1]), (wanted[-1], wanted[0])
        return any(_NAME.fullmatch(name) and equal(value, answer, is_complex) for name, value in sides)
    if not _is_true(given, is_complex):
        return False
    # Both name the same thing: their values decide.
    value = _under_name(wanted[0], given[0], given[-1], wanted[-1])
    if value is not None and _NAME.fullmatch(wanted[0]):
        same = len(given) == 2 or all(equal(wanted[-1], term, is_complex) for term in wanted[1:-1])
        return same and equal(wanted[-1], value, is_complex)
    ends, other_ends = wanted[:: len(wanted) - 1], given[:: len(given) - 1]
    steps = [read(term, is_complex) for term in given[1:-1]]
    computed = all(isinstance(step, Expr) and not step.is_Matrix for step in steps)
    # a statement's solutions do not tell what it says
    if computed and numbers.is_statement(read("=".join(ends), is_complex)):
        return all(equal(*pair, is_complex) for pair in zip(ends, other_ends, strict=True))
    # A longer chain is compared term by term, an equation as math-verify compares its solutions.
    if wanted != ends or given != other_ends:
        return all(equal(*pair, is_complex) for pair in zip_longest(wanted, given, fillvalue=""))
    return _equal_values(gold, answer, is_complex)


def _under_name(name: str, other: str, value: str, wanted: str) -> str | None:
    """Return the ``value`` of ``other`` as one of ``name``, whose own is ``wanted``; None if they name
    different things. ``y`` and ``f(x)`` name one function, and so do ``f(x)`` and ``f(t)``."""
    if re.sub(r"[() ]", "", name) == re.sub(r"[() ]", "", other):
        return value
    calls = [_FUNCTION.fullmatch(each) for each in (name, other)]
    variables = [call[1] for call in calls if call and call[1]]
    if not all(calls) or not variables or {*variables} & {name, other} or variables[0] not in wanted:
        return None
    if variables[0] == variables[-1]:
        return value
    if variables[0] in value or r"\text" in value:
        return None
    return _TOKEN.sub(lambda token: variables[0] if token[0] == variables[1] else token[0], value)


def _conclusions(answer: str, gold: str, is_complex: bool) -> list[str]:
    """Return the values an answer may stand for: the last of a chain of equations, if no link is false."""
    # ``x = \frac{1}{3} \approx 0.333``: terms, then roundings.
    exact, *roundings = split(answer, _APPROXIMATELY)
    terms = split(exact, _EQUALS)
    if len(terms) + len(roundings) == 1:
        return [answer]
    # ``5 = x`` has its value in front.
    value = terms[0] if _NAME.fullmatch(terms[-1]) and not _NAME.fullmatch(gold) else terms[-1]
    if not _is_true(terms, is_complex) or any(map(_is_false, pairwise(terms), repeat(is_complex))):
        return []
    # ``x \approx 0.333`` names no exact value.
    if roundings and _NAME.fullmatch(value):
        return roundings[-1:]
    true = all(_rounds_to(*pair, is_complex) for pair in pairwise([value, *roundings]))
    return [value, *roundings] if true else []


def _is_true(terms: list[str], is_complex: bool) -> bool:
    """Return True if the numbers among ``terms`` are equal."""
    terms = [*map(_hundredths, terms)]
    known = [term for term in terms if numbers.number_of(read(term, is_complex)) is not None]
    return all(_equal_values(known[0], other, is_complex) for other in known[1:])


def _is_false(link: tuple[str, str], is_complex: bool) -> bool:
    """Return True if two expressions of the same symbols are known to differ."""
    here, there = (read(term, is_complex) for term in link)
    symbols = [value.free_symbols for value in (here, there) if isinstance(value, Expr)]
    return len(symbols) == 2 and symbols[0] == symbols[1] and numbers.surely_different(here, there)


def _rounds_to(value: str, rounding: str, is_complex: bool) -> bool:
    exact, near = (numbers.number_of(read(_hundredths(each), is_complex)) for each in (value, rounding))
    number = rounding.removesuffix(r"\%")
    decimals = len(number.partition(".")[2]) + 2 * (number != rounding)
    # Half a unit of the last digit, and a little for a tie.
    return exact is not None and near is not None and abs(exact - near) <= 0.51 * 10.0**-decimals


def _equal_values(gold: str, answer: str, is_complex: bool) -> bool:
    """Return True if two expressions, relations or sets are equal by math-verify's rules, made exact."""
    words = _TEXT.findall(gold)
    if len(words) > 1 or words != _TEXT.findall(answer):
        return False  # words are no products of their letters, a sentence is no formula
    # ``4\text{remainder}3``: numbers around a word are in order, and no product
    if all(parts := _TEXT.split(gold)) and words:
        return all(equal(*pair, is_complex) for pair in zip(parts, _TEXT.split(answer), strict=True))
    wanted, given = read(gold, is_complex), read(answer, is_complex)
    if wanted is None or given is None:
        return False
    if numbers.is_huge(wanted) or numbers.is_huge(given):
        return numbers.as_written(wanted) == numbers.as_written(given)
    if numbers.surely_different(wanted, given):
        return False
    # Decimals as fractions first: math-verify would round them.
    if _verify(_exact(wanted), _exact(given)):
        both = isinstance(wanted, Eq) and isinstance(given, Eq)
        return not both or numbers.same_without_solutions(wanted, given)
    if not numbers.has_decimals(wanted, given) or not _verify(wanted, given):
        return False
    # math-verify, which rounds decimals to six places, takes small numbers for equal
    here, there = numbers.number_of(wanted), numbers.number_of(given)
    return here is None or there is None or abs(here - there) <= DECIMAL_ERROR * abs(here)


def _verify(gold: Any, answer: Any) -> bool:
    return verify(gold, answer, timeout_seconds=None, allow_set_relation_comp=True)


def _exact(value: Any) -> Any:
    """Return ``value`` with its decimals as the fractions they are written as."""
    if not numbers.has_decimals(value):
        return value
    return value.xreplace({decimal: Rational(str(decimal)) for decimal in value.atoms(Float)})


# --- the worker


def compare(item: dict[str, Any]) -> dict[str, Any]:
    r"""Compare gold and answer. ``correct``: the answer equals the gold; ``parsed``: it is mathematics, not
    only text. With ``parse``, both are as they were written, and their texts may decide: ``verdict``. An
    answer that is right under either reading of what is ambiguous is correct."""
    if "parse" in item:
        compared = compare_texts(**item)
        if isinstance(compared, str):
            return {"verdict": compared}
        item = dict(zip(("gold", "answer"), compared, strict=True))
    readings = [item]
    for pattern, spellings in _AMBIGUOUS:
        if any(map(pattern.search, item.values())):
            pairs = product(readings, spellings)
            readings = [{name: pattern.sub(one, text) for name, text in each.items()} for each, one in pairs]
    return max(map(_compare, readings), key=lambda reply: reply["correct"])


def _compare(item: dict[str, str]) -> dict[str, bool]:
    gold, answer = (
        _IMAGINARY.sub(r"\\iota ", text) if _INDEX.search(text) else text
        for text in (item["gold"], item["answer"])
    )
    is_complex = bool(_IMAGINARY.search(gold) or _IMAGINARY.search(answer))
    return {
        "correct": equal(gold, answer, is_complex),
        "parsed": is_readable(answer, is_complex),
        "gold_parsed": is_readable(gold, is_complex) or is_name(gold),
    }


def is_readable(text: str, is_complex: bool) -> bool:
    """Return True if all members of the text can be read, or the value that it names."""
    name, *values = split(text, _EQUALS)
    # ``x=5``: what is named must be readable.
    if len(values) == 1 and _NAME.fullmatch(name):
        text = values[0]
    return all(read(member, is_complex) is not None for member in members(text)[1]) or (
        read(text, is_complex) is not None
    )


def is_name(text: str) -> bool:
    r"""Return True if the text names an object that is no number, ``\mathbb{Z}/2\mathbb{Z}`` for example."""
    return bool(_OBJECT.search(text)) and _is_balanced(text)


def make_handler() -> Callable[[dict[str, Any]], dict[str, Any]]:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sys.set_int_max_str_digits(0)  # exact integers of any size; the grader's time limit bounds them
    return compare
