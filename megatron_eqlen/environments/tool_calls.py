"""Environments of one tool; its calls in the text of a turn, as Qwen3 (Hermes) and Llama 3 write them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, ClassVar, NamedTuple

from megatron_eqlen.environments.environment import Environment, Observation

_HERMES = re.compile(r"<tool_call>(.*?)(?:</tool_call>|$)", re.DOTALL)
_LLAMA = re.compile(r"\s*(?:<\|python_tag\|>)?\s*(\{.*\})\s*", re.DOTALL)


class ToolCall(NamedTuple):
    name: str
    arguments: dict[str, Any]


class BadToolCall(ValueError):
    """A call that cannot be read; the message is for the policy."""


def tool_calls(message: str) -> Iterator[ToolCall]:
    """Yield all calls of tools in a turn. What stands before ``</think>`` calls nothing. Raises
    BadToolCall."""
    spoken = message.rpartition("</think>")[2]
    calls = list(_HERMES.finditer(spoken)) or [_LLAMA.fullmatch(spoken)]
    return (_read(match[1]) for match in calls if match is not None)


def _read(text: str) -> ToolCall:
    try:
        call = json.loads(text)
    except ValueError as error:
        raise BadToolCall(f"the call is not JSON: {error}") from None
    arguments = call.get("arguments", call.get("parameters")) if isinstance(call, dict) else None
    if not isinstance(arguments, dict) or not isinstance(call.get("name"), str):
        raise BadToolCall('expected {"name": "...", "arguments": {...}}')
    return ToolCall(call["name"], arguments)


class ToolEnvironment(Environment):
    """Answers calls of one tool that takes a text; a turn without a call ends the response, and the prompt's
    grader grades it."""

    name: ClassVar[str]
    argument: ClassVar[str]

    def run(self, text: str) -> str:
        """Return the tool's answer."""
        raise NotImplementedError

    def step(self, message: str) -> Observation:
        try:
            call = next(tool_calls(message), None)
        except BadToolCall as error:
            return Observation(f"error: {error}")
        if call is None:
            return Observation(done=True)
        text = call.arguments.get(self.argument)
        if call.name != self.name or not isinstance(text, str):
            return Observation(f'error: expected the tool {self.name} with {{"{self.argument}": "..."}}')
        return Observation(self.run(text))


def schema(name: str, what: str, argument: str) -> dict[str, Any]:
    """Return the JSON schema of a tool that takes one text."""
    parameters = {"type": "object", "properties": {argument: {"type": "string"}}, "required": [argument]}
    return {"type": "function", "function": {"name": name, "description": what, "parameters": parameters}}
