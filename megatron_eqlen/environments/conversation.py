"""Between an environment, which reads and writes text, and tracks, which are tokens.

    path of a track:   generated ─ given ─ generated ─ given ─ generated
                       └─ turn 0 ┘         └─ turn 1 ┘         └─ the open turn

What was generated stays as it was sampled: no turn is ever rendered again. An observation is rendered alone,
as the chat template continues a conversation with it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from numbers import Real
from pathlib import Path
from typing import NamedTuple

import numpy as np

from megatron_eqlen.environments.environment import Environment, LostError, Observation
from megatron_eqlen.files import DISK_FAULTS
from megatron_eqlen.hf.tokenizer import encodable
from megatron_eqlen.processes.failures import words
from megatron_eqlen.recipe import EnvironmentRecipe
from megatron_eqlen.tokens import TokenIds, Tokens
from megatron_eqlen.types import Grade, Prompt

STATES = "environments"
"""Folder of saved states in the record of a step."""


class Turn(NamedTuple):
    """A turn of the policy with its answer."""

    generated: TokenIds
    given: TokenIds
    """Empty for the open turn."""


def turns_of(path: Tokens) -> list[Turn]:
    """Return the turns of a response so far; the last one is open."""
    generated = ~path.is_answer
    # a turn begins with a token of the policy after one of the environment
    begins = np.flatnonzero(generated[1:] & ~generated[:-1]) + 1
    parts = zip(np.split(path.token_ids, begins), np.split(generated, begins), strict=True)
    turns = [Turn(ids[own], ids[~own]) for ids, own in parts]
    if turns[-1].given.size:
        turns.append(Turn(path.token_ids[:0], path.token_ids[:0]))
    return turns


class Answer(NamedTuple):
    """Result of a call."""

    environment: Environment
    given: list[int] | None = None
    """Tokens that answer the turn; None: the response has ended."""
    grade: Grade | None = None
    """Grade of an ended response, where the environment grades."""
    cut: bool = False
    """True if a limit ended the response, not the environment."""
    changed: int = 0
    """Earlier turns to which a new environment, hearing them again, gave other answers than recorded."""


@dataclass(frozen=True)
class Conversations:
    """Makes the environments of a harvest, and translates for them."""

    make: Callable[[Prompt, int], Environment]
    """(prompt, seed) -> a new environment."""
    read: Callable[[TokenIds], str]
    """Tokens of a turn -> its text."""
    write: Callable[[Observation], list[int]]
    """Observation -> tokens from the turn's end to the next turn's start; beyond ``limits`` only some."""
    limits: EnvironmentRecipe = field(default_factory=EnvironmentRecipe)
    close: Callable[[], None] = lambda: None
    """Gives up what all environments share."""
    kept: Path | None = None
    """Folder of the step's record for states; those of earlier steps lie beside it. None: none are saved."""
    forked_as: tuple[int, ...] | None = None
    """``Environment.forked_as`` of one that is made, in place of the saved one's."""
    own_seeds: bool = False
    """True if each first track of a rollout has a seed of its own, as the samples of an evaluation have."""

    def answer(self, environment: Environment | None, prompt: Prompt, seed: int, turns: list[Turn]) -> Answer:
        """Let the environment answer the last of ``turns``, all turns of the response so far. None: a new
        one, which is told the turns before; the record stands, whatever it answers to these."""
        # compared with None: one of a user may have a length, and be false
        environment, is_new = (self.make(prompt, seed), True) if environment is None else (environment, False)
        try:
            # A new environment hears all turns again, or takes the state that was saved before this turn.
            first = 0 if is_new else len(turns) - 1
            if is_new and (saved := self._saved(seed, prompt, turns[:-1])) is not None:
                environment.load(saved.read_text(), saved.parent)
                first = len(turns) - 1
            if is_new and self.forked_as is not None:
                environment.forked_as = self.forked_as
            changed = sum(self._play(environment, t)[1] != t.given.tolist() for t in turns[first:-1])
            observation, given = self._play(environment, turns[-1])
            # Given tokens of all turns count against the limit.
            before = sum(len(turn.given) for turn in turns)
            over = len(turns) >= self.limits.max_turns or before + len(given) > self.limits.max_given_tokens
            if observation.done or over:
                return Answer(environment, None, _grade(environment), not observation.done, changed)
            # Saved only where the class says how.
            if self.kept is not None and type(environment).save is not Environment.save:
                answered = [*turns[:-1], turns[-1]._replace(given=np.array(given))]
                _save(environment, self.kept / STATES / _name(seed, prompt, answered, environment.forked_as))
            return Answer(environment, given, changed=changed)
        except BaseException:
            if is_new:  # nobody else has it
                closed(environment)
            raise

    def _play(self, environment: Environment, turn: Turn) -> tuple[Observation, list[int]]:
        """Return the environment's observation of a turn, and its tokens; none where the response has ended.
        Raises TypeError for no observation, ValueError if one lacks tokens: two turns would be one."""
        observation = environment.step(self.read(turn.generated))
        is_one = isinstance(observation, Observation) and isinstance(observation.content, str)
        # ``done`` of NumPy is equal to one of Python; the text "no" is true, and would end the response
        is_one = is_one and observation.done in (True, False)
        is_one = is_one and not (observation.messages and (observation.content or observation.keys))
        if not is_one or not all(isinstance(each, Mapping) for each in observation.messages):
            expected = "an Observation whose content is a str, done a bool, or whose messages are records"
            raise _wrong(environment, "step", expected, observation)
        given = [] if observation.done else self.write(observation)
        if not given and not observation.done:
            expected = "an Observation that the chat template writes as tokens"
            found = f"{observation.content!r}, which it writes as none"
            raise ValueError(f"{type(environment).__name__}.step: expected {expected}, found {found}")
        return observation, given

    def _saved(self, seed: int, prompt: Prompt, turns: list[Turn]) -> Path | None:
        """Return the file of the state after ``turns``, of this step or an earlier one; None without one."""
        if self.kept is None or not turns:
            return None
        forks = self.forked_as or ()
        # Most specific first: the line's own state, those of the lines that it forked from, then of any fork.
        names = [_name(seed, prompt, turns, forks[:stop]) for stop in range(len(forks), -1, -1)]
        found = (self.kept.parent.glob(f"*/{STATES}/{name}") for name in [*names, f"{names[-1]}-*[0-9]"])
        return next(chain.from_iterable(found), None)


def _name(seed: int, prompt: Prompt, turns: list[Turn], forks: Sequence[int] = ()) -> str:
    """Return the name of the state after ``turns``, which have all been answered, of a line."""
    said = [[turn.generated.tolist(), turn.given.tolist()] for turn in turns]
    digest = hashlib.sha256(json.dumps([seed, prompt.prompt_id, said]).encode()).hexdigest()
    return "-".join([digest, *map(str, forks)])


def _save(environment: Environment, file: Path) -> None:
    """Write the state. Raises LostError for a fault of the run's disk; other errors of ``save`` stay."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        if (text := environment.save(file.parent)) is not None:
            # two lines that said the same write at the same time
            partial = file.with_name(f".{file.name}.{threading.get_ident()}")
            partial.write_text(text, encoding="utf-8")
            partial.replace(file)
    except OSError as error:
        if error.errno not in DISK_FAULTS and not str(error.filename).startswith(str(file.parents[1])):
            raise
        raise LostError(f"an environment's state could not be saved: {words(error)}") from error


def forked(environment: Environment) -> Environment:
    """Return a copy of an environment. Raises TypeError for what is none."""
    if not isinstance(copied := environment.fork(), Environment):
        raise _wrong(environment, "fork", "an Environment", copied)
    return copied


def closed(environment: Environment) -> None:
    """Give up an environment, however that ends: nothing depends on it."""
    with contextlib.suppress(Exception):
        environment.close()


def _grade(environment: Environment) -> Grade | None:
    """Return the environment's grade of the response. Raises TypeError for what is no grade."""
    if (grade := environment.grade()) is None:
        return None
    # Texts of a user's code may hold half a surrogate pair, which no record takes.
    if isinstance(grade, Grade):
        texts = {name: getattr(grade, name) for name in ("verdict", "answer", "grader", "detail")}
        return replace(grade, **{name: text and encodable(str(text)) for name, text in texts.items()})
    grade = getattr(grade, "tolist", lambda: grade)()  # of NumPy or PyTorch
    with contextlib.suppress(OverflowError):  # an integer beyond floats
        if isinstance(grade, Real) and math.isfinite(grade):
            return Grade(float(grade), "scored", None, type(environment).__name__)
    raise _wrong(environment, "grade", "a finite number, a Grade or None", grade)


def _wrong(environment: Environment, method: str, expected: str, given: object) -> TypeError:
    name, text = f"{type(environment).__name__}.{method}", str(given)[:80]
    return TypeError(f"{name}: expected {expected}, found {text!r} of the type {type(given).__name__}")
