"""A user's reward function: ``function(question, completion, answer) -> float``, named by import path.

The names of `verifiers` are understood, too: a function whose parameters are called ``completion``, and
``prompt``, ``question`` or ``answer``, gets what it names, and may be ``async``.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable
from typing import Any

from megatron_eqlen.recipe.plugins import load_object
from megatron_eqlen.types import Grade, Prompt

COMPLETION = "completion"


class RewardFunction:
    """The function at the import path ``path``; ``key``: the recipe's key, for messages."""

    def __init__(self, path: str, key: str) -> None:
        self.path = path
        self._function: Callable[..., Any] = load_object(path, key)
        self._by_name = COMPLETION in inspect.signature(self._function).parameters

    def grade(self, prompt: Prompt, completion: str) -> Grade:
        """Return the grade of a response. Raises ValueError for a reward outside [0, 1]."""
        started = time.monotonic()
        reward = float(self._call(prompt, completion))
        if not 0.0 <= reward <= 1.0:
            raise ValueError(f"{self.path}: expected a reward in [0, 1], got {reward}")
        return Grade(reward, "scored", None, self.path, time.monotonic() - started)

    def _call(self, prompt: Prompt, completion: str) -> Any:
        if self._by_name:
            known = {"prompt": prompt.question, "question": prompt.question, "answer": prompt.gold}
            given = {COMPLETION: completion, **known}
            wanted = inspect.signature(self._function).parameters.values()
            everything = any(parameter.kind is parameter.VAR_KEYWORD for parameter in wanted)
            names = given if everything else given.keys() & {parameter.name for parameter in wanted}
            reward = self._function(**{name: given[name] for name in names})
        else:
            reward = self._function(prompt.question, completion, prompt.gold)
        return asyncio.run(reward) if inspect.iscoroutine(reward) else reward


def is_reward_function(path: str) -> bool:
    """Return True if ``path`` names a function of a response, False if it names a factory of graders, which
    takes the recipe's ``reward`` section alone."""
    loaded = load_object(path, "grader")
    if inspect.isclass(loaded):
        return False
    parameters = inspect.signature(loaded).parameters.values()
    required = [
        parameter
        for parameter in parameters
        if parameter.default is parameter.empty and parameter.kind is not parameter.VAR_KEYWORD
    ]
    return COMPLETION in {parameter.name for parameter in parameters} or len(required) == 3
