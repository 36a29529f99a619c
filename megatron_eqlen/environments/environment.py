"""Environments: they answer turns, grade responses, and can be copied.

    a turn of the policy ──step──► Observation ──chat template──► given tokens, which are not trained
                            └────► done: the response has ended, and is graded

An environment stands still while a turn is generated. A fork copies it, its random generator included: both
continuations are what the policy might have met, so comparing them is unbiased (docs/agents.md). With a new
environment in place of a copy it would not be.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from megatron_eqlen.processes.failures import name_of
from megatron_eqlen.types import Grade, Prompt


def require_limits(options: Mapping[str, Any], *names: str) -> None:
    """Raise ValueError for an option that is no limit: none, or beyond what a clock or the kernel counts."""
    for name in names:
        if not 0 < (found := options.get(name, 1)) < 1e9:
            expected = "expected a number above 0, below 1e9"
            raise ValueError(f"environment.options.{name}: {expected}, found {found}")


class LostError(RuntimeError):
    """Failure of something that all environments of a class share: the harvest ends."""


@dataclass(frozen=True)
class Observation:
    """Answer to a turn."""

    content: str = ""
    """Text that the policy reads."""
    done: bool = False
    """True if the response has ended; ``content`` is not read then."""
    role: str = "tool"
    """Role of the message in the chat template."""
    keys: Mapping[str, str] = field(default_factory=dict)
    """More keys of the message: ``name`` and ``tool_call_id`` of the call that it answers."""
    messages: Sequence[Mapping[str, Any]] = ()
    """Several messages, in place of ``content``, ``role`` and ``keys``, which are not given then."""


class Environment:
    """One episode. Subclass it: ``step`` is needed, and often ``__init__(prompt, seed, **options)``.

    ``seed`` is the same for all lines of a rollout, which are compared; each sample of an evaluation has its
    own. Draw from a generator of your own. ``options``: ``environment.options`` of the recipe. An exception
    means that the environment failed, not the policy: the response has no reward (``reward.on_error``);
    LostError ends the harvest. A tool's error or time-out is an observation.
    """

    tools: ClassVar[Sequence[Mapping[str, Any]]] = ()
    """JSON schemas of the tools, as the chat template takes them."""
    copies: ClassVar[bool] = True
    """False if ``fork`` is not possible: only sampling that forks nothing can be used."""
    forked_as: tuple[int, ...] = ()
    """Numbers of the forks that led to its line, the same when a run resumes."""
    refused: int = 0
    """Requests of an agent that were refused."""
    folder_bytes: int = 0
    folder_seconds: float = 0.0
    """Bytes of folders that were unpacked and packed, and the time that it took."""

    def __init__(self, prompt: Prompt, seed: int) -> None: ...

    def step(self, message: str) -> Observation:
        """Answer a turn of the policy. ``message``: its text, without end-of-sequence tokens."""
        raise NotImplementedError

    def grade(self) -> Grade | float | None:
        """Return the reward of the ended response. None: the prompt's grader grades its last turn."""
        return None

    def fork(self) -> Environment:
        """Return an independent copy in the same state. Called between steps; the harvest waits."""
        try:
            return copy.deepcopy(self)
        except Exception as error:
            found = f"{name_of(error)}: define fork, or set copies = False"
            expected = "a state that copy.deepcopy copies"
            raise TypeError(f"{type(self).__name__}.fork: expected {expected}, found {found}") from error

    def save(self, place: Path) -> str | None:
        """Return text from which ``load`` restores the state; large parts stay in files of the folder
        ``place``. None: a resumed run tells a new environment the messages."""
        return None

    def load(self, text: str, place: Path) -> None:
        """Take the state that ``save`` returned in an earlier process."""

    def close(self) -> None:
        """Give up what the environment holds."""

    def opening(self) -> tuple[Sequence[Any], Sequence[Any]] | None:
        """Return the messages and tools that the prompt must consist of; None if any prompt fits."""
        return None

    @classmethod
    def schemas(cls, **options: Any) -> Sequence[Mapping[str, Any]]:
        """Return the JSON schemas of the tools, as the chat template takes them."""
        return cls.tools

    @classmethod
    def start(cls, **options: Any) -> None:
        """Load what all environments of the class share. Raises ValueError for options that do not fit."""

    @classmethod
    def end(cls) -> None:
        """Give up what all environments of the class share, at the end of the process."""
