r"""Extracts the answer of a response: the content of its last box."""

from __future__ import annotations

import re

from megatron_eqlen.rewards.thinking import answer_section

LONGEST_TAIL = 32_768
"""Characters at the end of a response in which the answer is looked for."""

_MARK = re.compile(r"\\(?:boxed|fbox|framebox)(?![A-Za-z])\s*(\{)?|\\[{}\\]|[{}]")
_ARGUMENT = re.compile(
    r"[+-]?(?:\\[dtc]?frac\s*(?:\{[^{}]*\}|\d)\s*(?:\{[^{}]*\}|\d)|\d+(?:[.,]\d+)*"
    r"|\\[A-Za-z]+(?:\{[^{}]*\})?|[A-Za-z](?![A-Za-z]))"
)
"""The content of a box without braces. TeX would take one token, but people mean the whole number."""
_SEPARATOR = re.compile(r"(?:[\s$,;&{}]|\\(?:q?quad|text|[,;()\[\]])|and\b|or\b|[A-Za-z](?:_\{?\w\}?)?\s*=)*")


def extract_answer(text: str) -> str | None:
    """Return the content of the last balanced, non-empty box after the last ``</think>``; None without one.

    Boxes are ``\boxed``, ``\fbox`` and ``\framebox``, with braces or without. A box in a box belongs to the
    outer one. Boxes with nothing between them but ``,``, ``and``, ``or`` are one answer, a list: of two
    answers side by side neither is chosen.
    """
    tail = answer_section(text, LONGEST_TAIL)
    boxes = [box for box in _boxes(tail) if box[1].strip()]
    if not boxes:
        return None
    start, content, _ = boxes.pop()
    answers = [content.strip()]
    while boxes and _SEPARATOR.fullmatch(tail, boxes[-1][2], start):
        start, content, _ = boxes.pop()
        if content.strip() not in answers:
            answers.insert(0, content.strip())
    return ", ".join(answers)


def _boxes(text: str) -> list[tuple[int, str, int]]:
    """(start, content, end) of every outermost box, in order."""
    opened: list[tuple[int, int]] = []  # of each open brace: start and content of its box, -1 if it has none
    boxes: list[tuple[int, str, int]] = []
    for match in _MARK.finditer(text):
        mark = match.group()
        if mark == "{" or match.group(1):
            opened.append((match.start(), match.end()) if match.group(1) else (-1, -1))
        elif mark == "}" and opened:
            start, inside = opened.pop()
            if start >= 0:
                while boxes and boxes[-1][0] > start:
                    boxes.pop()
                boxes.append((start, text[inside : match.start()], match.end()))
        elif mark.strip()[1:].isalpha() and (argument := _ARGUMENT.match(text, match.end())):
            boxes.append((match.start(), argument.group(), argument.end()))
    return boxes
