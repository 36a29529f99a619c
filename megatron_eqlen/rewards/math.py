"""The math grader: is the last boxed answer of a response equal to the gold one?

1. The text is cut at its last ``</think>``; what comes before is not the answer.
2. The last balanced ``\\boxed{}`` is taken here, not by math-verify: on a whole text two different boxes
   merge into a set, and a right answer scores 0.
3. ``exact`` compares texts after normalisation, ``math_verify`` parses both, ``either`` asks the second
   where the first says no. The paper says "exact answer matching".
"""

from __future__ import annotations

import logging
import re
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import version
from typing import Literal

from megatron_eqlen.rewards.workers import WorkerPool
from megatron_eqlen.types import Grade

log = logging.getLogger(__name__)

MathRule = Literal["exact", "math_verify", "either"]

EXACT_VERSION = 1
"""Raised whenever ``normalize`` or ``extract_answer`` changes a verdict."""
LONGEST_TAIL = 32_768
"""Characters at the end of a response in which the answer is looked for."""
LONGEST_ANSWER = 2_000
"""Characters; a longer answer counts as unparseable."""
MEMO_SIZE = 100_000

_BRACE = re.compile(r"\\boxed\s*\{|\\[{}\\]|[{}]")
_WIDE_SPACE = re.compile(r"\\[;:> ]|\\q?quad(?![A-Za-z])|~")
_SPACE = re.compile(r"\\[,!]|(?<!\d)\s+|\s+(?!\d)")
"""Not the space between two digits: ``1 1/2`` is not ``11/2``."""
_WRAPPED = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|mathit|boxed)\s*\{([^{}]*)\}")
_THOUSANDS = re.compile(r"[+-]?\d{1,3}(?:(?:,|\{,\})\d{3})+(?:\.\d+)?")
_INTEGER = re.compile(r"([+-]?)0*(\d+)")
_PLAIN_NUMBER = re.compile(r"[+-]?(?:\d+(?:\.\d+)?|\\frac\{[+-]?\d+\}\{[1-9]\d*\}|\d+/[1-9]\d*)")
_WORD = re.compile(r"[A-Za-z]{3,}|[Nn][Oo]")


def extract_answer(text: str) -> str | None:
    """The content of the last balanced, non-empty ``\\boxed{}`` after the last ``</think>``; None without
    one.

    A box inside a box belongs to the outer one; a box that is never closed does not count.
    """
    tail = text.rpartition("</think>")[2][-LONGEST_TAIL:]
    opened: list[int] = []  # of each open brace: where its box's content starts, -1 for a plain brace
    boxes: list[tuple[int, int]] = []
    for match in _BRACE.finditer(tail):
        mark = match.group()
        if mark in ("{", "}") or mark.startswith("\\boxed"):
            if mark != "}":
                opened.append(match.end() if mark != "{" else -1)
            elif opened and (start := opened.pop()) >= 0:
                while boxes and boxes[-1][0] > start:
                    boxes.pop()
                boxes.append((start, match.start()))
    answers = (tail[start:end].strip() for start, end in reversed(boxes))
    return next((answer for answer in answers if answer), None)


def normalize(answer: str) -> str:
    """``answer`` without what does not change its value: dollars, spaces, sizes, text wrappers, leading
    zeros.
    """
    text = answer.strip().replace("$", "").replace("\\(", "").replace("\\)", "")
    text = re.sub(r"\\(?:left|right|displaystyle)(?![A-Za-z])", "", text)
    text = re.sub(r"\\[dtc]frac", r"\\frac", text)
    while (unwrapped := _WRAPPED.sub(r"\1", text)) != text:
        text = unwrapped
    text = _SPACE.sub("", _WIDE_SPACE.sub(" ", text)).removesuffix(".")
    if _THOUSANDS.fullmatch(text):
        text = text.replace("{,}", "").replace(",", "")
    if integer := _INTEGER.fullmatch(text):
        sign, digits = integer.groups()
        return ("-" if sign == "-" and digits != "0" else "") + digits
    return text.lower() if _WORD.fullmatch(text) else text


class MathGrader:
    """Grades responses in killable worker processes; the same (gold, answer) is verified once.

    ``timeout``: seconds an answer may take. The processes start with the first answer that needs them.
    """

    def __init__(self, rule: MathRule = "either", workers: int = 2, timeout: float = 5.0) -> None:
        self.rule = rule
        self._workers = workers
        self._timeout = timeout
        self._pool: WorkerPool | None = None
        self._memo: OrderedDict[tuple[str, str], Grade] = OrderedDict()

    @property
    def name(self) -> str:
        """The rule with its versions; recorded with every grade."""
        parts = {
            "exact": [f"exact-{EXACT_VERSION}"],
            "math_verify": [f"math_verify-{version('math-verify')}"],
        }
        return "+".join(parts.get(self.rule, parts["exact"] + parts["math_verify"]))

    def grade(self, texts: Sequence[str], golds: Sequence[str]) -> list[Grade]:
        """A grade for each response text against its gold: correct, wrong, no_answer, unparseable or
        timeout.
        """
        answers = [extract_answer(text) for text in texts]
        keys = [(gold, answer) for gold, answer in zip(golds, answers, strict=True) if answer is not None]
        self._verify(keys)
        return [
            Grade(0.0, "no_answer", None, self.name) if answer is None else self._recall(gold, answer)
            for gold, answer in zip(golds, answers, strict=True)
        ]

    def check_golds(self, golds: Sequence[str]) -> list[str | None]:
        """For each gold None if it can be graded against, or the reason why not.

        A gold must parse and equal itself; else every right answer would be a silent 0.
        """
        reasons = {gold: "unparseable_gold" if len(gold) > LONGEST_ANSWER else None for gold in golds}
        if self.rule == "exact":
            return [reasons[gold] if normalize(gold) else "unparseable_gold" for gold in golds]
        wanted = [gold for gold, reason in reasons.items() if not (reason or _PLAIN_NUMBER.fullmatch(gold))]
        checks = self._ask([{"gold": gold, "answer": gold} for gold in wanted])
        reasons |= {gold: _gold_reason(check) for gold, check in zip(wanted, checks, strict=True)}
        return [reasons[gold] for gold in golds]

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def _recall(self, gold: str, answer: str) -> Grade:
        return replace(self._memo[gold, answer])

    def _verify(self, keys: Sequence[tuple[str, str]]) -> None:
        """Fill the memo for ``keys``, then forget the oldest beyond MEMO_SIZE that are not among them."""
        unknown = []
        for key in dict.fromkeys(keys):
            if key in self._memo:
                self._memo.move_to_end(key)
            elif (grade := self._grade_here(*key)) is not None:
                self._memo[key] = grade
            else:
                unknown.append(key)
        replies = self._ask([{"gold": gold, "answer": answer} for gold, answer in unknown])
        for (gold, answer), reply in zip(unknown, replies, strict=True):
            self._memo[gold, answer] = self._grade(_verdict(reply), answer, reply["seconds"])
        while len(self._memo) > max(MEMO_SIZE, len(set(keys))):
            self._memo.popitem(last=False)

    def _grade_here(self, gold: str, answer: str) -> Grade | None:
        """The grade where no worker is needed, else None."""
        if len(answer) > LONGEST_ANSWER:
            return self._grade("unparseable", answer)
        if self.rule == "math_verify":
            return None
        expected, found = normalize(gold), normalize(answer)
        if expected == found:
            return self._grade("correct", answer)
        integers = _INTEGER.fullmatch(expected) and _INTEGER.fullmatch(found)
        return self._grade("wrong", answer) if self.rule == "exact" or integers else None

    def _grade(self, verdict: str, answer: str, seconds: float = 0.0) -> Grade:
        line = " ".join(answer.split())
        shown = line if len(line) <= 200 else line[:197] + "..."
        return Grade(float(verdict == "correct"), verdict, shown, self.name, seconds)

    def _ask(self, items: list[dict[str, str]]) -> list[dict]:
        if not items:
            return []
        if self._pool is None:
            self._pool = WorkerPool("megatron_eqlen.rewards.math_worker", self._workers)
        replies = self._pool.map(items, self._timeout)
        for item, reply in zip(items, replies, strict=True):
            if "failure" in reply:
                log.warning("math grader: %s on %.200r", reply["failure"], item["answer"])
        return replies


def _verdict(reply: dict) -> str:
    if "timeout" in reply:
        return "timeout"
    if "failure" in reply:
        return "unparseable"
    if reply["correct"]:
        return "correct"
    return "wrong" if reply["parsed"] else "unparseable"


def _gold_reason(reply: dict) -> str | None:
    if "timeout" in reply:
        return "gold_timeout"
    if "failure" in reply or not reply["gold_parsed"]:
        return "unparseable_gold"
    return None if reply["correct"] else "gold_differs_from_itself"
