"""Background grading: a thread decodes each response and hands it to its grader, as soon as it ends.

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
"""Key of a response: its prompt's id and a hash of its token ids. Equal responses are graded once."""


def response_key(prompt: Prompt, response: TokenIds) -> Key:
    return prompt.prompt_id, blake2b(response.tobytes()).digest()


class Background:
    """Responses whose grading was begun and whose grade was not yet asked for. ``read`` decodes a response:
    (token ids, ``longest`` of the grader) -> text for the grader."""

    def __init__(self, read: Callable[[TokenIds, int], str]) -> None:
        self._read = read
        self._thread = ThreadPoolExecutor(1, "grading")
        self._begun: dict[Key, tuple[BackgroundGrader, Future[Pending]]] = {}

    def __contains__(self, key: Key) -> bool:
        return key in self._begun

    def begin(self, key: Key, grader: BackgroundGrader, prompt: Prompt, response: TokenIds) -> None:
        """Start grading a response. Costs the caller next to nothing; ``grade`` raises its errors."""
        if key not in self._begun:
            self._begun[key] = grader, self._thread.submit(self._start, grader, prompt, response)

    def ready(self, keys: Collection[Key]) -> list[Grade]:
        """Return the grades that are ready, for those of ``keys`` that were begun."""
        grades = [self.grade(key, deadline=0.0) for key in keys if key in self._begun]
        return [grade for grade in grades if grade is not None]

    def grade(self, key: Key, deadline: float = float("inf")) -> Grade | None:
        """Return the grade of a response that was begun; None if there is none at ``deadline`` (monotonic
        seconds). Raises the grader's error, with a note that names the prompt."""
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
        """Return the grade of a response whose grader was too late."""
        return Grade(0.0, "timeout", None, self._begun[key][0].name, detail=detail)

    def give_up(self) -> None:
        """Forget everything: pending grades are not waited for, and their processes are killed."""
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
    """Add a note that names the prompt to an error of the block."""
    try:
        yield
    except Exception as error:
        error.add_note(f"while an answer to prompt {prompt_id} was graded")
        raise


def _left(deadline: float) -> float | None:
    return None if deadline == float("inf") else max(0.0, deadline - time.monotonic())


def _is_under_way(begun: Future[Pending]) -> bool:
    return not begun.cancelled() and begun.exception() is None and not begun.result().done()
