"""Grades to come: responses are decoded and handed to their graders by a thread, as soon as they end.

begin ─► thread: decode what the grader reads ─► grader.begin ─► Pending ─► grade, when it is asked for
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from hashlib import blake2b

from megatron_eqlen.rewards.grader import BackgroundGrader, Pending
from megatron_eqlen.types import Grade, Prompt, TokenIds

Key = tuple[str, bytes]
"""A response: its prompt's id and a hash of its token ids. Equal responses are graded once."""


def response_key(prompt: Prompt, response: TokenIds) -> Key:
    return prompt.prompt_id, blake2b(response.tobytes()).digest()


class Background:
    """What was begun and not yet asked for. ``read`` makes text of a response: (token ids, the ``longest`` of
    the grader) -> what the grader reads."""

    def __init__(self, read: Callable[[TokenIds, int], str]) -> None:
        self._read = read
        self._thread = ThreadPoolExecutor(1, "grading")
        self._begun: dict[Key, tuple[BackgroundGrader, Future[Pending]]] = {}

    def __contains__(self, key: Key) -> bool:
        return key in self._begun

    def begin(self, key: Key, grader: BackgroundGrader, prompt: Prompt, response: TokenIds) -> None:
        """Costs the caller next to nothing; what goes wrong is raised by ``grade``."""
        if key not in self._begun:
            self._begun[key] = grader, self._thread.submit(self._start, grader, prompt, response)

    def ready(self, keys: Collection[Key]) -> list[Grade]:
        """The grades among those of ``keys`` that are there."""
        grades = [self.grade(key, deadline=0.0) for key in keys if key in self._begun]
        return [grade for grade in grades if grade is not None]

    def grade(self, key: Key, deadline: float = float("inf")) -> Grade | None:
        """The grade of a response that was begun; None if there is none at ``deadline`` (monotonic seconds).
        Raises what its grader raised, with a note that names the prompt."""
        begun = self._begun[key][1]
        with naming(key[0]):
            if wait([begun], _left(deadline)).not_done:
                return None
            pending = begun.result()
            try:
                return pending.result(_left(deadline))
            except TimeoutError:
                if pending.done():
                    raise
                return None

    def timeout(self, key: Key, detail: str) -> Grade:
        """In place of a grade that came too late."""
        return Grade(0.0, "timeout", None, self._begun[key][0].name, detail=detail)

    def give_up(self) -> None:
        """Forget everything; what has no grade yet is not waited for, and its processes are killed."""
        begun, self._begun = self._begun, {}
        for _, pending in begun.values():
            pending.cancel()
        wait([pending for _, pending in begun.values()])
        for grader in {grader for grader, pending in begun.values() if _is_under_way(pending)}:
            grader.cut()

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)
        self._begun.clear()

    def _start(self, grader: BackgroundGrader, prompt: Prompt, response: TokenIds) -> Pending:
        return grader.begin(self._read(response, grader.longest), prompt.gold)


@contextmanager
def naming(prompt_id: str) -> Iterator[None]:
    """An error of the block gets a note that names the prompt."""
    try:
        yield
    except Exception as error:
        error.add_note(f"while an answer to prompt {prompt_id} was graded")
        raise


def _left(deadline: float) -> float | None:
    return None if deadline == float("inf") else max(0.0, deadline - time.monotonic())


def _is_under_way(begun: Future[Pending]) -> bool:
    return not begun.cancelled() and begun.exception() is None and not begun.result().done()
