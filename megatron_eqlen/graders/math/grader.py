"""The math grader: is the last boxed answer of a response equal to the gold one?

    response ──extract──► answer ──normalise──► text with unit ──match──► two texts ──compare──► verdict
                here                answer.py                   match.py                worker.py

Short answers are normalised and matched in this process, long ones in a worker. Normal forms that differ as
texts are read as mathematics. The paper says "exact answer matching".
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from concurrent.futures import Future
from importlib.metadata import version

from megatron_eqlen.graders.grader import PoolGrader, answer_section, known
from megatron_eqlen.graders.math.match import compare_texts
from megatron_eqlen.graders.workers.host import Item
from megatron_eqlen.graders.workers.pool import WorkerPool
from megatron_eqlen.types import Grade

log = logging.getLogger(__name__)

RULES_VERSION = 9
"""Raised whenever our own rules change a verdict: extraction, normal form, units, structure."""
LONGEST_TAIL = 32_768
"""Characters at the end of a response in which the answer is looked for."""
LONGEST_ANSWER = 2_000
"""Most characters of an answer; a longer one counts as unparseable."""
LONGEST_HERE = 100
"""Most characters that this process brings into normal form (0.4 ms); a worker does 2,000 in up to 43 ms."""
MEMO_SIZE = 100_000
WORKER_MODULE = "megatron_eqlen.graders.math.worker"

_NO_GOLD = re.compile(
    r"(?:Interval|FiniteSet|Union|\w+Set|Poly|Eq|Point\dD|range|tensor|datetime\.\w+)\("
    r"|(?i:\s*(?:proof|not ?found|see (?:the )?(?:solution|proof|above|below))[\s.]*$)"
)
"""Objects of Python and SymPy that no answer spells so, and what stands where there is none (NuminaMath)."""
# ``-3``, ``0.5``, ``\frac{1}{2}``, ``1/2``: golds that need no check.
_PLAIN_NUMBER = re.compile(r"[+-]?(?:\d+(?:\.\d+)?|\\frac\{[+-]?\d+\}\{[1-9]\d*\}|\d+/[1-9]\d*)")


class MathGrader(PoolGrader):
    """Grades responses in killable worker processes; the same (gold, answer) is verified once. Verdicts:
    correct, wrong, no_answer, unparseable, timeout. ``timeout``: seconds an answer may take."""

    name = f"either-{RULES_VERSION}+math_verify-{version('math-verify')}"

    def __init__(self, workers: int = 2, timeout: float = 5.0) -> None:
        self._workers, self._timeout = workers, timeout
        self._memo: dict[tuple[str, str], Future[Grade]] = {}

    def begin(self, text: str, gold: str) -> Future[Grade]:
        if (answer := extract_answer(text)) is None:
            return known(Grade(0.0, "no_answer", None, self.name))
        key = gold, answer
        if key not in self._memo:
            # Full: begin anew, since answers of old steps rarely come again.
            if len(self._memo) == MEMO_SIZE:
                self._memo.clear()
            self._memo[key] = self._compare(gold, answer)
        return self._memo[key]

    def close(self) -> None:
        super().close()
        self._memo.clear()  # what was cancelled is asked again

    def check_golds(self, golds: Sequence[str]) -> list[str | None]:
        """Return for each gold None, or the reason why nothing can be graded against it: a gold must parse
        and equal itself, else every right answer would silently get 0."""
        unfit = {gold: len(gold) > LONGEST_ANSWER or _NO_GOLD.match(gold) for gold in golds}
        reasons = {gold: "unparseable_gold" if is_unfit else None for gold, is_unfit in unfit.items()}
        wanted = [gold for gold, reason in reasons.items() if not (reason or _PLAIN_NUMBER.fullmatch(gold))]
        questions: list[Item] = [{"gold": gold, "answer": gold, "parse": True} for gold in wanted]
        checks = self.pool.map(questions, self._timeout) if questions else []
        reasons |= {gold: _gold_reason(check) for gold, check in zip(wanted, checks, strict=True)}
        return [reasons[gold] for gold in golds]

    def _compare(self, gold: str, answer: str) -> Future[Grade]:
        if len(answer) > LONGEST_ANSWER:
            return known(self._grade("unparseable", answer))
        question: Item = {"gold": gold, "answer": answer, "parse": False}
        # Texts decide most answers, in less time than it takes to ask a worker.
        if max(len(gold), len(answer)) <= LONGEST_HERE:
            compared = compare_texts(gold, answer)
            if isinstance(compared, str):
                return known(self._grade(compared, answer))
            question = dict(zip(("gold", "answer"), compared, strict=True))
        return self.pool.submit(
            question,
            self._timeout,
            lambda reply: self._grade(self._verdict(reply, answer), answer, reply["seconds"]),
        )

    def _grade(self, verdict: str, answer: str, seconds: float = 0.0) -> Grade:
        line = " ".join(answer.split())
        shown = line if len(line) <= 200 else line[:197] + "..."
        return Grade(float(verdict == "correct"), verdict, shown, self.name, seconds)

    def _verdict(self, reply: dict, answer: str) -> str:
        if "verdict" in reply:
            return reply["verdict"]
        if "timeout" in reply:
            return "timeout"
        if "failure" in reply:
            log.warning("math grader: %s on %.200r", reply["failure"], answer)
            return "unparseable"
        return "correct" if reply["correct"] else "wrong" if reply["parsed"] else "unparseable"

    def _make_pool(self) -> WorkerPool:
        return WorkerPool(WORKER_MODULE, self._workers)


def _gold_reason(reply: dict) -> str | None:
    if "timeout" in reply:
        return "gold_timeout"
    if "failure" in reply or "verdict" in reply or not reply["gold_parsed"]:
        return "unparseable_gold"
    return None if reply["correct"] else "gold_differs_from_itself"


# --- the boxed answer of a response

# A box's beginning, an escaped brace, which opens nothing, or a brace.
_MARK = re.compile(r"\\(?:boxed|fbox|framebox)(?![A-Za-z])\s*(\{)?|\\[{}\\]|[{}]")
_ARGUMENT = re.compile(
    r"[+-]?(?:\\[dtc]?frac\s*(?:\{[^{}]*\}|\d)\s*(?:\{[^{}]*\}|\d)|\d+(?:[.,]\d+)*"
    r"|\\[A-Za-z]+(?:\{[^{}]*\})?|[A-Za-z](?![A-Za-z]))"
)
"""The content of a box without braces. TeX would take one token, but people mean the whole number."""
# What may stand between the boxes of a list: ``\boxed{1}, \text{and } y = \boxed{2}``.
_SEPARATOR = re.compile(r"(?:[\s$,;&{}]|\\(?:q?quad|text|[,;()\[\]])|and\b|or\b|[A-Za-z](?:_\{?\w\}?)?\s*=)*")


def extract_answer(text: str) -> str | None:
    r"""Return the content of the last balanced, non-empty box after the last ``</think>``; None without one.

    Boxes are ``\boxed``, ``\fbox`` and ``\framebox``, with braces or without. Of nested boxes the outermost
    counts. Boxes with nothing between them but ``,``, ``and`` or ``or`` are one answer, a list.
    """
    tail = answer_section(text, LONGEST_TAIL)
    if not (boxes := [box for box in _boxes(tail) if box[1].strip()]):
        return None
    start, content, _ = boxes.pop()
    answers = [content.strip()]
    while boxes and _SEPARATOR.fullmatch(tail, boxes[-1][2], start):
        start, content, _ = boxes.pop()
        # A box that repeats another adds nothing.
        if content.strip() not in answers:
            answers.insert(0, content.strip())
    return ", ".join(answers)


def _boxes(text: str) -> list[tuple[int, str, int]]:
    """Return (start, content, end) of every outermost box, in order."""
    opened: list[tuple[int, int]] = []  # of each open brace: start and content of its box, -1 if it has none
    boxes: list[tuple[int, str, int]] = []
    for match in _MARK.finditer(text):
        mark = match.group()
        if mark == "{" or match.group(1):
            opened.append((match.start(), match.end()) if match.group(1) else (-1, -1))
        elif mark == "}" and opened:
            start, inside = opened.pop()
            if start >= 0:
                # Boxes inside this one: the outermost counts.
                while boxes and boxes[-1][0] > start:
                    boxes.pop()
                boxes.append((start, text[inside : match.start()], match.end()))
        elif mark.strip()[1:].isalpha() and (argument := _ARGUMENT.match(text, match.end())):
            boxes.append((match.start(), argument.group(), argument.end()))
    return boxes
