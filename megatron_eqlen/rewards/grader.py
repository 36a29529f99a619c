"""What a grader is, and a grade to come."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

from megatron_eqlen.rewards.workers.host import Item
from megatron_eqlen.types import Grade


class Grader(Protocol):
    """What a factory named by import path returns, called with the recipe's ``reward`` section."""

    def grade(self, texts: Sequence[str], golds: Sequence[str]) -> list[Grade]:
        """A grade for each response text against its gold, in order."""
        ...

    def close(self) -> None:
        """End processes, if it has any."""
        ...


class Pending(Protocol):
    """A grade to come."""

    def done(self) -> bool: ...
    def result(self, timeout: float | None = None) -> Grade:
        """Wait for it. Raises TimeoutError if it is not there after ``timeout`` seconds."""
        ...


@runtime_checkable
class BackgroundGrader(Grader, Protocol):
    """A grader that works while responses are generated: its work is done by other processes, so that it
    takes no time from the one that drives the engine. ``begin`` and ``cut`` are called by one thread at a
    time."""

    @property
    def name(self) -> str:
        """With its version; recorded with every grade."""
        ...

    @property
    def longest(self) -> int:
        """How many characters of a response's answer (``thinking.answer_section``) it reads, counted from the
        end: what comes before them cannot change a grade, and is not decoded."""
        ...

    def begin(self, text: str, gold: str) -> Pending:
        """Start grading a response, of which ``text`` is at least what the grader reads."""
        ...

    def cut(self) -> None:
        """Give up what was begun and has no grade."""
        ...


@dataclass(frozen=True)
class Known(Pending):
    """A grade that needs no waiting."""

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
