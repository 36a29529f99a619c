"""Environments of a harvest's tracks: when they are called, copied and given up."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from megatron_eqlen.environments.calls import Call, Calls
from megatron_eqlen.environments.conversation import (
    Answer,
    Conversations,
    Turn,
    answer,
    replayed,
    turns_of,
)
from megatron_eqlen.environments.environment import Environment
from megatron_eqlen.sampling.harvester import Harvester
from megatron_eqlen.sampling.track import Track, track_seed
from megatron_eqlen.tokens import Tokens
from megatron_eqlen.types import Metrics, Prompt, Rollout, RolloutKey, rollout_key

log = logging.getLogger(__name__)

COINS = -1
"""Number, in place of a track's, in the seed that all environments of a rollout share; with own seeds they
have this number and those below."""


class _State(NamedTuple):
    environment: Environment
    turns: int
    """Turns that it has answered."""


class Dialogues:
    """Lets environments answer the turns that tracks have ended.

    An environment is made when its track first needs it: new, or where the track's line was answered before
    (a fork, a resumed track), by a copy or by replaying the messages.
    """

    def __init__(self, speak: Conversations) -> None:
        self.speak = speak
        self.calls = Calls(speak.workers, speak.timeout)
        self._states: dict[RolloutKey, dict[int, _State]] = {}
        """By the number of the track."""
        self._due: dict[Track, float] = {}
        """Turns that wait for other tracks, and since when."""
        self._asked: set[Track] = set()
        self.last_error: BaseException | None = None
        """Why the last rollout that was left out failed."""
        self.answered = self.cut = self.dropped = self.copies = self.replays = self.refused = 0
        self.seconds = self.waited = 0.0

    def begin(self, key: RolloutKey, harvester: Harvester) -> None:
        """Start the calls that the harvester allows."""
        now = time.monotonic()
        for track in harvester.open.values():
            if track.calls:
                self._due.setdefault(track, now)
        for track in harvester.calls():
            if track not in self._asked:
                self._asked.add(track)
                self.waited += now - self._due[track]
                state = self._states.get(key, {}).get(track.number)
                turns = turns_of(path_of(harvester, track))
                self.replays += state is None and len(turns) > 1
                work = partial(
                    _call, self.speak, state, harvester.prompt, self._seed(harvester, track), turns
                )
                self.calls.start(Call(key, track, len(turns), work))

    def fork(self, key: RolloutKey, harvester: Harvester, launched: Sequence[Track]) -> Exception | None:
        """Copy, for each new track, the environment of the line that it leaves, as it is there. Return the
        environment's error, if it has one."""
        states, lines = self._states.get(key, {}), list(harvester.open.values())
        for track in launched:
            for line in lines:
                state = states.get(line.number)
                if line is track or line.parent != track.parent or state is None:
                    continue
                if state.turns == len(turns_of(path_of(harvester, track))) - 1:  # not where it is resumed
                    assert line not in self._asked, "an environment is copied between its calls"
                    try:
                        copied = state.environment.fork()
                    except Exception as error:  # noqa: BLE001  another's code
                        return error
                    states[track.number] = state._replace(environment=copied)
                    self.copies += 1
                    break
        return None

    def take(self, call: Call) -> None:
        """Use the result of a call: the track goes on, or has ended."""
        assert call.result is not None
        track, (environment, given, grade, cut) = call.track, call.result
        self._asked.discard(track)
        self._due.pop(track, None)
        self.answered += 1
        self.cut += cut
        self.seconds += call.ended - call.started
        states = self._states.setdefault(call.key, {})
        states[track.number] = _State(environment, call.turns)
        if given is None:
            track.finish(grade)
        else:
            track.answer(given, call.turns - 1)

    def end(self, key: RolloutKey) -> None:
        """Give up the environments of a rollout."""
        self.calls.forget(key)
        for track in [track for track in self._due if (track.prompt_id, track.index) == key]:
            del self._due[track]
            self._asked.discard(track)
        for state in self._states.pop(key, {}).values():
            self.refused += state.environment.refused
            with contextlib.suppress(Exception):  # another's code, and nothing depends on it
                state.environment.close()

    def close(self) -> None:
        """Give up all environments."""
        for key in list(self._states):
            self.end(key)

    def _seed(self, harvester: Harvester, track: Track) -> int:
        number = COINS - track.number if self.speak.own_seeds else COINS
        return track_seed(harvester.seed, harvester.prompt.prompt_id, harvester.index, number)

    def metrics(self) -> Metrics:
        turns = max(self.answered, 1)
        return {
            "environment/turns": self.answered,
            "environment/seconds": self.seconds / turns,
            "environment/waited": self.waited / turns,
            "environment/cut": self.cut,
            "environment/copies": self.copies,
            "environment/replays": self.replays,
            "environment/dropped": self.dropped,
            "environment/refused": self.refused,
        }


def path_of(harvester: Harvester, track: Track) -> Tokens:
    """Return the tokens of a track's response so far."""
    own = track.tokens[track.place(track.start) :]
    return Tokens.joined([*(part.tokens for part in harvester.line(track.parent)), own])


def _call(
    speak: Conversations, state: _State | None, prompt: Prompt, seed: int, turns: Sequence[Turn]
) -> Answer:
    environment = replayed(speak, prompt, seed, list(turns[:-1])) if state is None else state.environment
    return answer(speak, environment, list(turns))


def grade_again(speak: Conversations, rollout: Rollout, seed: int) -> bool:
    """Fill in the environments' grades of a recorded rollout that was not scored, by replaying its messages.
    Return False if an environment fails or answers otherwise: the rollout must be generated again.
    ``seed``: of its harvester."""
    seed = track_seed(seed, rollout.prompt_id, rollout.index, COINS)
    for part in rollout.parts:
        if part.finish_reason == "stop" and part.grade is None:
            turns = turns_of(Tokens.joined([above.tokens for above in rollout.line(part.number)]))
            try:
                part.grade = answer(speak, replayed(speak, rollout.prompt, seed, turns[:-1]), turns).grade
            except Exception as error:  # noqa: BLE001  another's code
                log.warning("rollout %s/%d is generated again: %r", *rollout_key(rollout), error)
                return False
    return True
