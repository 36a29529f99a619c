"""What runs inside a math grader's worker: parse and compare with ``math-verify``, with no time limit of
its own.

The gold comes first (``verify`` is not symmetric), and both sides are wrapped in ``\\boxed{}``: a bare
``Yes`` parses to nothing, and without the anchor unboxed guesses would pass.

ANTLR's two-stage parse (first SLL, full LL where that fails) makes reading LaTeX 5 times faster; by ANTLR's
own guarantee a parse that SLL completes is the one LL would give.
"""

from __future__ import annotations

import logging
import re
import resource
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from antlr4 import PredictionMode
from antlr4.error.ErrorListener import ErrorListener
from latex2sympy2_extended.latex2sympy2 import _Latex2Sympy
from math_verify import LatexExtractionConfig, parse, verify
from sympy import Expr, Rational, UnevaluatedExpr

MEMORY_BYTES = 3 << 30
"""Address space of a worker: ``9^{9^{9^9}}`` must not take the machine's memory."""

DIGITS = 15
BARE_WORD = re.compile(r"[A-Za-z]+(?:[ -][A-Za-z]+)*")
WARM_UP = (
    r"\frac{1}{2}",
    r"2\sqrt{3}",
    "x^2+1",
    "(1,2)",
    r"\{1,2\}",
    "[0,1)",
    "0.25",
    r"\text{Yes}",
    r"e^{\pi}",
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


@lru_cache(maxsize=4096)
def parse_answer(answer: str) -> tuple[Any, ...]:
    """What math-verify reads: a SymPy expression where it can, then the text."""
    if BARE_WORD.fullmatch(answer) and (len(answer) > 2 or answer.lower() == "no"):
        answer = rf"\text{{{answer}}}"  # else a product of one-letter symbols, equal to every anagram
    config = [LatexExtractionConfig(try_extract_without_anchor=False)]
    return tuple(parse(rf"$\boxed{{{answer}}}$", config, parsing_timeout=None))


def surely_different(gold: Any, answer: Any) -> bool:
    """Both are expressions that differ at one point of their symbols: no simplification can make them equal.

    Most wrong answers end here, at a tenth of what SymPy's ``simplify`` costs. False says nothing.
    """
    if not (isinstance(gold, Expr) and isinstance(answer, Expr)):
        return False
    if gold.is_Symbol or answer.is_Symbol or gold.has(UnevaluatedExpr) or answer.has(UnevaluatedExpr):
        return False  # names compare as text, and 10% is both 10 and 0.1
    symbols = sorted(gold.free_symbols | answer.free_symbols, key=str)
    point = {symbol: Rational(2 * number + 3, 7 * number + 11) for number, symbol in enumerate(symbols)}
    try:
        here, there = (complex(side.subs(point).evalf(DIGITS)) for side in (gold, answer))
    except (TypeError, ValueError, OverflowError, AttributeError):
        return False  # not a number there
    return abs(here - there) > 1e-3 * max(1.0, abs(here), abs(there))


def compare(item: dict[str, str]) -> dict[str, bool]:
    """``correct``: the answer equals the gold; ``parsed``: the answer is an expression, not only text."""
    gold, answer = parse_answer(item["gold"]), parse_answer(item["answer"])
    correct = not (gold and answer and surely_different(gold[0], answer[0])) and bool(
        verify(list(gold), list(answer), timeout_seconds=None)
    )
    return {
        "correct": correct,
        "parsed": any(not isinstance(part, str) for part in answer),
        "gold_parsed": any(not isinstance(part, str) for part in gold),
    }


def make_handler() -> Callable[[dict[str, str]], dict[str, bool]]:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    return compare


for _answer in WARM_UP:  # once in the host: workers are forked with the parser's tables filled
    compare({"gold": _answer, "answer": _answer})
