"""Protocols of graders, the part of a response that they read, and grades that are still being computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

from megatron_eqlen.rewards.workers.host import Item
from megatron_eqlen.types import Grade

END_OF_THINKING = "</think>"
"""End tag of the thinking. Prompts of thinking models end with ``<think>``, so responses hold this tag alone,
or none."""


def answer_section(text: str, longest: int) -> str:
    """Return the text after the last ``</think>``, the whole text without one; at most its last ``longest``
    characters."""
    return text.rpartition(END_OF_THINKING)[2][-longest:]


class Grader(Protocol):
    """Result of a factory named by import path, which is called with the recipe's ``reward`` section."""

    def grade(self, texts: Sequence[str], golds: Sequence[str]) -> list[Grade]:
        """Return a grade for each response text against its gold, in order."""
        ...

    def close(self) -> None:
        """End the grader's processes, if it has any."""
        ...


class Pending(Protocol):
    """A grade that may still be computed."""

    def done(self) -> bool: ...
    def result(self, timeout: float | None = None) -> Grade:
        """Wait for the grade. Raises TimeoutError if it is not there after ``timeout`` seconds."""
        ...


@runtime_checkable
class BackgroundGrader(Grader, Protocol):
    """A grader that works while responses are generated: other processes do its work, so that it takes no
    time from the process that drives the engine. ``begin`` and ``cut`` are called by one thread at a time."""

    @property
    def name(self) -> str:
        """Name and version; recorded with every grade."""
        ...

    @property
    def longest(self) -> int:
        """Most characters of a response's answer (``answer_section``) that the grader reads, counted
        from the end: earlier characters cannot change a grade, and are not decoded."""
        ...

    def begin(self, text: str, gold: str) -> Pending:
        """Start grading a response; ``text`` is at least the part that the grader reads."""
        ...

    def cut(self) -> None:
        """Cancel grading that was begun and has no grade yet."""
        ...


@dataclass(frozen=True)
class Known(Pending):
    """A grade that is known at once."""

    grade: Grade

    def done(self) -> bool:
        return True

    def result(self, timeout: float | None = None) -> Grade:
        return replace(self.grade)


@dataclass(eq=False)
class Asked(Pending):
    """A grade that depends on a worker's answer; ``read`` makes it."""

    answer: Future[Item]
    read: Callable[[Item], Grade]
    grade: Grade | None = None

    def done(self) -> bool:
        return self.answer.done()

    def result(self, timeout: float | None = None) -> Grade:
        if self.grade is None:
            self.grade = self.read(self.answer.result(timeout))
        return replace(self.grade)
