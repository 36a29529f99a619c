"""Protocols of graders, and background grading: responses are decoded and graded as soon as they end.

begin ─► thread: decode ─► grader.begin ─► Future ─► grade, when it is asked for
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from hashlib import blake2b
from typing import Protocol

from megatron_eqlen.graders.workers.pool import WorkerPool
from megatron_eqlen.types import Grade, Prompt, TokenIds

END_OF_THINKING = "</think>"
"""End tag of the thinking. Prompts may end with ``<think>``; responses then hold only this tag."""


def answer_section(text: str, longest: int) -> str:
    """Return the text after the last ``</think>`` (or all of it), at most its last ``longest`` characters."""
    if not isinstance(text, str):
        raise TypeError(f"response: expected a text, found {text!r:.100}")
    return text.rpartition(END_OF_THINKING)[2][-longest:]


class Grader(Protocol):
    """Result of a user's factory, which gets the ``reward`` section, and the ``seed`` if it takes one."""

    def grade(self, texts: Sequence[str], golds: Sequence[str]) -> list[Grade]:
        """Return a grade for each response text against its gold, in order."""
        ...

    def close(self) -> None:
        """End the grader's processes, if it has any."""


class PoolGrader:
    """A grader whose work a pool of processes does while responses are generated. The pool starts with the
    first response that needs it. One thread at a time calls ``begin`` and ``close``."""

    name: str
    """Name and version; recorded with every grade."""
    _pool: WorkerPool | None = None

    def begin(self, text: str, gold: str) -> Future[Grade]:
        """Start grading a response."""
        raise NotImplementedError

    def grade(self, texts: Sequence[str], golds: Sequence[str]) -> list[Grade]:
        begun = [self.begin(text, gold) for text, gold in zip(texts, golds, strict=True)]
        return [grade.result() for grade in begun]

    def close(self) -> None:
        """End the processes and cancel grading that has no grade yet. The grader may begin again."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    @property
    def pool(self) -> WorkerPool:
        if self._pool is None:
            self._pool = self._make_pool()
        return self._pool

    def _make_pool(self) -> WorkerPool:
        raise NotImplementedError


def known(grade: Grade) -> Future[Grade]:
    """Return a finished future."""
    future: Future[Grade] = Future()
    future.set_result(grade)
    return future


Key = tuple[str, bytes]
"""Key of a response: its prompt's id and a hash of its token ids. Equal responses are graded once."""


def response_key(prompt: Prompt, response: TokenIds) -> Key:
    return prompt.prompt_id, blake2b(response.tobytes()).digest()


class Background:
    """Responses whose grade was not yet asked for. ``decode``: token ids -> text."""

    def __init__(self, decode: Callable[[TokenIds], str]) -> None:
        self._decode = decode
        self._thread = ThreadPoolExecutor(1, "grading")
        self._begun: dict[Key, tuple[PoolGrader, Future[Future[Grade]]]] = {}

    def __contains__(self, key: Key) -> bool:
        return key in self._begun

    def begin(self, key: Key, grader: PoolGrader, prompt: Prompt, response: TokenIds) -> None:
        """Start grading a response. Costs the caller next to nothing; ``grade`` raises its errors."""
        if key not in self._begun:
            begin = self._thread.submit(lambda: grader.begin(self._decode(response), prompt.gold))
            self._begun[key] = grader, begin

    def ready(self, keys: Collection[Key]) -> list[Grade]:
        """Return the grades that are ready, for those of ``keys`` that were begun."""
        # Two futures: the thread's, that grading has begun, and the grader's, inside it.
        begun = [self._begun[key][1] for key in keys if key in self._begun]
        started = [each.result() for each in begun if each.done() and not each.exception()]
        return [each.result() for each in started if each.done() and not each.exception()]

    def grade(self, key: Key, deadline: float) -> Grade | None:
        """Return a begun response's grade, None at ``deadline`` (monotonic s). Raises the grader's error."""
        begun = self._begun[key][1]
        if wait([begun], _left(deadline)).not_done or wait([begun.result()], _left(deadline)).not_done:
            return None
        return begun.result().result()

    def give_up(self) -> None:
        """Forget everything; kill the processes of graders that are still at work."""
        begun, self._begun = self._begun, {}
        # Those that have not begun are dropped, those that begin at the moment are waited for.
        for _, grade in begun.values():
            grade.cancel()
        wait([grade for _, grade in begun.values()])
        started = [(grader, each) for grader, each in begun.values() if not each.cancelled()]
        # A grader ends with its workers, so only those with work in flight are closed.
        for grader in {g for g, each in started if each.exception() is None and not each.result().done()}:
            grader.close()

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)
        self._begun.clear()


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
