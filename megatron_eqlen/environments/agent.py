"""An external agent: a function that speaks to the policy as to OpenAI, and returns a reward. It
runs in a thread beside the harvest. Each of its requests is an observation, and waits for the policy's turn;
where the function returns, the response has ended."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from megatron_eqlen.environments.endpoint import Endpoint, Episode, Message
from megatron_eqlen.environments.environment import Environment, Observation
from megatron_eqlen.files import read_json
from megatron_eqlen.recipe.plugins import load_object
from megatron_eqlen.types import Grade, Prompt

ENDED, FUNCTION = "the response has ended", "environment.options: function"


class Agent(Environment):
    """Plays ``function(base_url, prompt, seed, **arguments)``."""

    copies = False
    endpoint: Endpoint | None = None
    """Shared by all; there is one from ``start`` to ``end``."""

    def __init__(
        self, prompt: Prompt, seed: int, function: str, tools: str | None = None, **arguments: Any
    ) -> None:
        """``function``: its import path, perhaps ``async``. ``tools``: JSON file of its requests' schemas."""
        assert self.endpoint is not None
        self.episode = Episode()
        base_url = self.endpoint.open(self.episode)
        play = partial(load_object(function, FUNCTION), base_url, prompt, seed, **arguments)
        threading.Thread(target=_play, args=(self.episode, play), name="agent", daemon=True).start()
        try:
            if self.episode.asked() is None:
                raise RuntimeError("the agent ended before its first request")
        except BaseException:
            self.close()
            raise

    def opening(self) -> tuple[Sequence[Message], Sequence[Message]]:
        return self.episode.requests[0]

    def step(self, message: str) -> Observation:
        self.episode.answer(message)
        asked = self.episode.asked()
        return Observation(done=True) if asked is None else Observation(messages=tuple(asked))

    def grade(self) -> Grade | float | None:
        if not self.episode.ended:  # a limit ended the response: the agent may still say what it is worth
            self.episode.close(ENDED)
            self.episode.wait()
            # Refused in the middle of its work it may well fail: that is worth 0, and is no error.
            if self.episode.error is not None:
                return 0.0
        return self.episode.reward

    def close(self) -> None:
        self.episode.close(ENDED)
        if self.endpoint is not None:
            self.endpoint.episodes.pop(self.episode.key, None)

    @property
    def refused(self) -> int:
        return self.episode.refused

    @classmethod
    def schemas(cls, tools: str | None = None, **options: Any) -> Sequence[Mapping[str, Any]]:
        if tools is None:
            return ()
        read = read_json(Path(tools))
        listed = read if isinstance(read, list) else [None]
        if wrong := [each for each in listed if not isinstance(each, dict) or "function" not in each]:
            expected = 'expected a list as OpenAI takes it, [{"type": "function", "function": {...}}]'
            raise ValueError(f"{tools}: {expected}, found {wrong[0] or read!r:.200}")
        return read

    @classmethod
    def start(cls, **options: Any) -> None:
        arguments = {name: value for name, value in options.items() if name not in ("function", "tools")}
        try:
            # Options must be arguments of the function beside the three that every agent gets.
            inspect.signature(load_object(options["function"], FUNCTION)).bind("", None, 0, **arguments)
        except TypeError as error:
            call = f"{options['function']}(base_url, prompt, seed, **options)"
            raise ValueError(f"environment.options: {call}: {error}") from None
        if Agent.endpoint is None:
            Agent.endpoint = Endpoint()

    @classmethod
    def end(cls) -> None:
        if Agent.endpoint is not None:
            Agent.endpoint.close()
            Agent.endpoint = None


def _play(episode: Episode, play: Callable[[], Any]) -> None:
    try:
        reward = play()
        episode.end(asyncio.run(reward) if inspect.iscoroutine(reward) else reward)
    except BaseException as error:  # noqa: BLE001  the user's code: the rollout is dropped
        episode.end(error=error)
