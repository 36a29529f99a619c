"""What runs inside a math grader's worker: parse and compare with ``math-verify``, with no time limit of
its own.

The gold comes first (``verify`` is not symmetric), and both sides are wrapped in ``\\boxed{}``: a bare
``Yes`` parses to nothing, and without the anchor unboxed guesses would pass.
"""

from __future__ import annotations

import logging
import re
import resource
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from math_verify import LatexExtractionConfig, parse, verify

MEMORY_BYTES = 3 << 30
"""Address space of a worker: ``9^{9^{9^9}}`` must not take the machine's memory."""

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


@lru_cache(maxsize=4096)
def parse_answer(answer: str) -> tuple[Any, ...]:
    """What math-verify reads: a SymPy expression where it can, then the text."""
    if BARE_WORD.fullmatch(answer) and (len(answer) > 2 or answer.lower() == "no"):
        answer = rf"\text{{{answer}}}"  # else a product of one-letter symbols, equal to every anagram
    config = [LatexExtractionConfig(try_extract_without_anchor=False)]
    return tuple(parse(rf"$\boxed{{{answer}}}$", config, parsing_timeout=None))


def compare(item: dict[str, str]) -> dict[str, bool]:
    """``correct``: the answer equals the gold; ``parsed``: the answer is an expression, not only text."""
    gold, answer = parse_answer(item["gold"]), parse_answer(item["answer"])
    correct = bool(verify(list(gold), list(answer), timeout_seconds=None))
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
