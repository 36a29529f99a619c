"""Environments of a harvest's tracks: when they are called, copied and given up."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import fmean
from typing import NamedTuple

from megatron_eqlen.engines.protocol import EngineError
from megatron_eqlen.environments.conversation import Answer, Conversations, closed, forked, turns_of
from megatron_eqlen.environments.environment import Environment, LostError
from megatron_eqlen.processes.failures import name_of, text_of
from megatron_eqlen.sampling.harvester import Harvester
from megatron_eqlen.sampling.track import Track, track_seed
from megatron_eqlen.tokens import Tokens
from megatron_eqlen.types import UNSCORED, Grade, Metrics, Rollout, RolloutKey

log = logging.getLogger(__name__)

COINS = -1
"""Number, in a seed in place of a track's, that all environments of a rollout share; own seeds go below."""

COUNTED = "turns", "cut", "copies", "replays", "changed", "refused", "folder_bytes", "folder_seconds"
"""Names of what is counted of environments, without ``environment/``."""


@dataclass(eq=False)
class Call:
    """A turn that an environment answers."""

    track: Track
    turns: int
    """Turns of the response so far, with the one that is answered."""
    work: Callable[[], Answer]
    is_new: bool
    """True if ``work`` makes the environment: no state holds it yet."""
    result: Future[Answer] = field(default_factory=Future)
    started: float = 0.0
    ended: float = 0.0

    def run(self) -> Answer:
        try:
            return self.work()
        finally:
            self.ended = time.perf_counter()

    def leave(self) -> None:
        """Wait no longer for the result."""
        if self.is_new:
            self.result.add_done_callback(_close)


def _begun[R](work: Callable[[], R]) -> Future[R]:
    """Run a user's code in a daemon thread: one that never returns does not keep the process alive."""
    result: Future[R] = Future()

    def run() -> None:
        try:
            value = work()
        except BaseException as error:  # noqa: BLE001  a user's code, which may also exit
            result.set_exception(error if isinstance(error, Exception) else RuntimeError(name_of(error)))
        else:
            result.set_result(value)

    threading.Thread(target=run, name="environment", daemon=True).start()
    return result


def _within(seconds: float, work: Callable[[], Answer]) -> Answer:
    """Return the result of a user's code. Raises its error, or TimeoutError."""
    result = _begun(work)
    if wait([result], seconds).not_done:
        result.add_done_callback(_close)
        raise _late(seconds)
    return result.result()


def _late(seconds: float) -> TimeoutError:
    return TimeoutError(f"no answer in {seconds:g} s (environment.timeout)")


def _close(result: Future[Answer]) -> None:
    if result.exception() is None:
        closed(result.result().environment)


class _State(NamedTuple):
    environment: Environment
    track: Track
    turns: int
    """Turns that it has answered."""


class Dialogues:
    """Lets environments answer the turns that tracks have ended. An environment is made when its track first
    needs it: new, or where the track's line was answered before (a fork, a resumed track), by a copy or by
    replaying the messages. Without ``conversations`` no track ends a turn."""

    def __init__(self, conversations: Conversations | None) -> None:
        self.conversations = conversations
        self.timeout = conversations.limits.timeout if conversations else 0.0
        self.waiting: deque[Call] = deque()
        """Calls that wait for a worker."""
        self.running: list[Call] = []
        self._states: dict[RolloutKey, dict[int, _State]] = {}
        """By the number of the track."""
        self._due: dict[Track, float] = {}
        """Turns that wait for other tracks, and since when."""
        self.fork_error: Exception | None = None
        self.counts = Counter[str]()
        """Counts of this attempt at the harvest."""
        self._ends: dict[RolloutKey, Counter[str]] = {}
        """Counts of ends of responses; a resume asks for them again unless the rollout is recorded."""
        self._called: list[float] = []
        self._waited: list[float] = []
        """Seconds of calls, and of waits for a fork before them."""
        # environments close in threads of their own; `close` waits for these
        self._closing: list[Future[None]] = []

    @property
    def calls(self) -> tuple[Call, ...]:
        """Calls that are not finished."""
        return *self.waiting, *self.running

    def begin(self, harvester: Harvester) -> None:
        """Start the calls that the harvester allows."""
        if self.conversations is None:
            return
        now = time.perf_counter()
        # a wait begins where the turn ends, though the harvester may hold the answer back for a fork
        for track in harvester.open.values():
            if track.awaits_answer:
                self._due.setdefault(track, now)
        asked = {call.track for call in self.calls}
        for track in harvester.answerable():
            if track not in asked:
                self._waited.append(now - self._due[track])
                # none at a first turn, after a failed copy and after a resume: a new one is told the turns
                state = self._states.get(track.key, {}).get(track.number)
                turns = turns_of(path_of(harvester, track))
                self.counts["replays"] += state is None and len(turns) > 1
                environment = state and state.environment
                seed = _seed(self.conversations, harvester.seed, harvester.key, track.number)
                conversations = replace(self.conversations, forked_as=track.forks)
                work = partial(conversations.answer, environment, harvester.prompt, seed, turns)
                self.waiting.append(Call(track, len(turns), work, environment is None))
        self._admit()

    def _admit(self) -> None:
        while self.conversations and self.waiting and len(self.running) < self.conversations.limits.workers:
            call = self.waiting.popleft()
            call.started = time.perf_counter()
            self.running.append(call)
            call.result = _begun(call.run)

    def fork(self, harvester: Harvester, launched: Sequence[Track]) -> None:
        """Copy its line's environment for each new track; where that fails, tell a new one the messages."""
        states = self._states.get(harvester.key, {})
        for track in launched if states else ():
            # the last turn of its path is open: the fork starts with it
            turns = len(turns_of(path_of(harvester, track))) - 1
            for state in [*states.values()]:  # of lines that have ended meanwhile, too
                passed = [part.number for part in harvester.line(state.track.parent)]
                if state.turns == turns and track.parent in passed:  # not where it is resumed
                    calling = [call.track for call in self.calls]
                    assert state.track not in calling, "it is copied between them"
                    if isinstance(self.fork_error, TimeoutError):  # once is enough
                        break
                    try:
                        made = _within(self.timeout, lambda of=state.environment: Answer(forked(of)))
                        made.environment.forked_as = track.forks
                        states[track.number] = _State(made.environment, track, turns)
                        self.counts["copies"] += 1
                    except Exception as error:  # noqa: BLE001  a user's code
                        if self.fork_error is None:
                            told = name_of(error)
                            log.warning("forks get new environments, which are told the messages: %s", told)
                        self.fork_error = error
                    break

    def finished(self, idle: bool) -> Iterator[Call]:
        """Yield calls that have ended, or taken too long: a failure. ``idle``: wait a moment for one."""
        if not self.calls:
            return
        wait([call.result for call in self.running], timeout=0.05 if idle else 0, return_when=FIRST_COMPLETED)
        now = time.perf_counter()
        for call in self.running:
            # its thread cannot be ended: a failure takes the result's place, which is closed when it comes
            if now - call.started > self.timeout and not call.result.done():
                call.leave()
                call.result, call.ended = Future(), now
                call.result.set_exception(_late(self.timeout))
        for call in [call for call in self.running if call.result.done()]:
            self.running.remove(call)
            self._called.append(call.ended - call.started)
            yield call
        self._admit()

    def take(self, call: Call) -> None:
        """Use the result of a call: the track continues or has ended. Raises EngineError if a new environment
        in place of a copy gave other answers: to drop its rollout would be to drop those that fork."""
        track, (environment, given, grade, cut, changed) = call.track, call.result.result()
        self._states.setdefault(track.key, {})[track.number] = _State(environment, track, call.turns)
        if changed and self.fork_error is not None:
            otherwise = f"cannot be told the messages: it answers {changed} of them otherwise"
            raise EngineError(f"{text_of(self.fork_error)}; a new environment {otherwise}")
        self._due.pop(track, None)
        if given is None:
            track.finish(grade)
        else:
            track.answer(given, call.turns - 1)
        # a resume has the turns between from the record, but asks for the end of a response again
        ended = self._ends.setdefault(track.key, Counter())
        turns = self.counts if track.finish_reason is None else ended
        turns["turns"] += 1
        ended["cut"] += cut
        self.counts["changed"] += changed

    def end(self, key: RolloutKey) -> None:
        """Give up the environments of a rollout, and the calls."""
        self.waiting = deque(call for call in self.waiting if call.track.key != key)
        for call in [call for call in self.running if call.track.key == key]:
            call.leave()
            self.running.remove(call)
        for track in [track for track in self._due if track.key == key]:
            del self._due[track]
        self.counts.update(self._ends.pop(key, ()))
        for state in self._states.pop(key, {}).values():
            for name in ("refused", "folder_bytes", "folder_seconds"):
                self.counts[name] += getattr(state.environment, name)
            self._closing.append(_begun(state.environment.close))

    def fail(self, call: Call, error: BaseException, on_error: str) -> None:
        """End a response whose environment failed, without a reward: that says nothing about the policy.
        Raises EngineError where all responses would fail, and with ``reward.on_error: end``."""
        if isinstance(error, LostError):
            raise EngineError(text_of(error)) from error
        (prompt_id, index), failed = call.track.key, f"its environment failed: {name_of(error)}"
        if on_error == "end":
            raise EngineError(f"rollout {prompt_id}/{index}: {failed} (reward.on_error)") from error
        log.warning("rollout %s/%d has a response without a reward, %s", prompt_id, index, failed)
        self._due.pop(call.track, None)
        call.track.finish(Grade.unscored(failed))

    def close(self) -> None:
        """Give up all environments."""
        if self.conversations is None:
            return
        for key in {*self._states, *(call.track.key for call in self.calls)}:
            self.end(key)
        if late := wait(self._closing, self.timeout).not_done:
            log.warning("%d environments did not close in %g s", len(late), self.timeout)

    def metrics(self, counts: Mapping[str, int]) -> Metrics:
        if self.conversations is None:
            return {}
        metrics = {"seconds": fmean(self._called or [0.0]), "waited": fmean(self._waited or [0.0])}
        metrics |= {name: counts[name] for name in COUNTED}
        return {f"environment/{name}": value for name, value in metrics.items()}


def _seed(conversations: Conversations, seed: int, key: RolloutKey, number: int) -> int:
    """Return the seed of the environment of track ``number``, which is also its part's number where seeds are
    its own: a completion is one part."""
    return track_seed(seed, *key, COINS - number if conversations.own_seeds else COINS)


def path_of(harvester: Harvester, track: Track) -> Tokens:
    """Return the tokens of a track's response so far."""
    own = track.tokens[track.place(track.start) :]
    return Tokens.joined([*(part.tokens for part in harvester.line(track.parent)), own])


def grade_again(conversations: Conversations, rollout: Rollout, seed: int) -> bool:
    """Fill in the environments' grades of a recorded rollout by replaying its messages. Return False if an
    environment fails: the rollout must be generated again. ``seed``: of its harvester."""
    for part in rollout.parts:
        # no grade of an environment is recorded with it, or only its failure: play the turns to a new one
        if part.finish_reason == "stop" and (part.grade is None or part.grade.verdict == UNSCORED):
            turns = turns_of(Tokens.joined([above.tokens for above in rollout.line(part.number)]))
            coins = _seed(conversations, seed, rollout.key, part.number)
            again = partial(conversations.answer, None, rollout.prompt, coins, turns)
            try:
                graded = _within(conversations.limits.timeout, again)
                if graded.given is not None:
                    raise RuntimeError("it does not end the response this time")
                part.grade = graded.grade
                _begun(graded.environment.close)
            except Exception as error:  # noqa: BLE001  a user's code
                log.warning("rollout %s/%d is generated again: %s", *rollout.key, name_of(error))
                return False
    return True
