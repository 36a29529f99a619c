"""Environments whose methods are tools; calls in a turn's text, as Qwen3 (Hermes) and Llama 3 write them."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, ClassVar, NamedTuple, NotRequired, TypedDict, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import to_json

from megatron_eqlen.environments.environment import Environment, Observation

# ``<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>``, perhaps cut off at its end.
_HERMES = re.compile(r"<tool_call>(.*?)(?:</tool_call>|$)", re.DOTALL)
# ``<|python_tag|>{"name": "f", "parameters": {"x": 1}}``, and nothing else in the turn.
_PYTHON = r"\s*(?:(?:<\|python_tag\|>|<\|python_start\|>.*<\|python_end\|>)\s*)?"
_LLAMA = re.compile(rf"{_PYTHON}(\{{.*\}})\s*", re.DOTALL)

# A thought, perhaps cut off or opened by the prompt, or a call, in whose arguments tags are text.
_CALL = r"<tool_call>(?:(?!<tool_call>).)*?</tool_call>|<tool_call>(?:(?!<tool_call>|</think>).)*\Z"
_ALONE = rf'(?:\A|(?<=</think>)){_PYTHON}\{{\s*"(?:(?!\}}\s*</think>|</think>\s*\{{).)*\}}\s*\Z'
_THOUGHT = re.compile(rf"<think>.*?(?:</think>|\Z)|</think>|({_CALL}|{_ALONE})", re.DOTALL)


class ToolCall(NamedTuple):
    name: str
    arguments: dict[str, Any]
    id: str | None = None
    """Id that the policy wrote, as Kimi does."""


class ToolError(ValueError):
    """A call that cannot be read, or that a tool refuses; the policy reads the message."""


def tool_calls(message: str) -> Iterator[ToolCall]:
    """Yield all calls of tools in a turn. What stands before ``</think>`` calls nothing. Raises ToolError."""
    return map(_read, _texts(message))


def spoken(message: str) -> str:
    """Return what stands behind the thinking of a turn, nothing where that never closes."""
    thoughts = (each.end() for each in _THOUGHT.finditer(message) if not each[1])
    return message[max(thoughts, default=0) :]


def as_text(call: ToolCall) -> str:
    """Return a call as Qwen3 writes it."""
    known = {key: value for key, value in call._asdict().items() if value is not None}
    return f"<tool_call>\n{json.dumps(known)}\n</tool_call>"


def _texts(message: str) -> list[str]:
    said = spoken(message)
    if (alone := _LLAMA.fullmatch(said)) is None or not ('"name"' in said or "<|python_" in said):
        return _HERMES.findall(said)
    texts, rest = [], alone[1]
    with suppress(ValueError, RecursionError):
        while rest:  # Llama 4's stand one behind the other, with or without a semicolon
            _, end = json.JSONDecoder().raw_decode(rest)
            texts.append(rest[:end])
            rest = rest[end:].lstrip("; \n")
    return [*texts, rest] if rest else texts


def _read(text: str) -> ToolCall:
    try:
        call = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ToolError(f"the call is not JSON, or not as the chat template has calls: {error}") from None
    arguments = call.get("arguments", call.get("parameters")) if isinstance(call, dict) else None
    if not isinstance(arguments, dict) or not isinstance(call.get("name"), str):
        raise ToolError('expected {"name": "...", "arguments": {...}}')
    return ToolCall(call["name"], arguments, call.get("id") if isinstance(call.get("id"), str) else None)


def tool[**P, R](method: Callable[P, R]) -> Callable[P, R]:
    """Make a method a tool. Its name, docstring and type hints are the schema; the policy reads what it
    returns, as JSON if that is no text, and the message of a ToolError that it raises."""
    getattr(method, "__func__", method).__dict__["is_tool"] = True  # of a static method, too
    return method


class ToolEnvironment(Environment):
    """Answers calls of its methods that are tools, in order. A turn without a call ends the response."""

    most_calls: ClassVar[int] = 16
    """Calls of a turn that are run. All together must end within ``environment.timeout``."""
    _arguments: ClassVar[dict[str, TypeAdapter[dict[str, Any]]]] = {}

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        # Base classes first, each class's methods as they stand; an override keeps its place.
        names = dict.fromkeys(name for base in reversed(cls.__mro__) for name in vars(base))
        found = [name for name in names if hasattr(getattr(cls, name), "is_tool")]
        # as an instance has them, without ``self``
        methods = {name: inspect.getattr_static(cls, name).__get__(0, cls) for name in found}
        if waits := [name for name, method in methods.items() if inspect.iscoroutinefunction(method)]:
            expected = "expected a tool that returns its answer"
            raise TypeError(f"{cls.__name__}.{waits[0]}: {expected}, found async")
        cls._arguments = {name: _arguments_of(method) for name, method in methods.items()}
        cls.tools = [_schema(method, cls._arguments[name]) for name, method in methods.items()]

    def step(self, message: str) -> Observation:
        answers = [self._answer(text, number) for number, text in enumerate(_texts(message))]
        # Several calls are answered by as many messages.
        if len(answers) > 1:
            messages = [{"role": "tool", "content": answer.content, **answer.keys} for answer in answers]
            return Observation(messages=messages)
        return answers[0] if answers else Observation(done=True)

    def _answer(self, text: str, number: int) -> Observation:
        keys: dict[str, str] = {}
        try:
            # Refused calls are answered, too: each call needs a message.
            if number >= self.most_calls:
                raise ToolError(f"more than {self.most_calls} calls in a turn")
            call = _read(text)
            keys = {"name": call.name} | ({"tool_call_id": call.id} if call.id else {})
            arguments = self._checked(call)
            result = getattr(self, call.name)(**arguments)
        except ToolError as error:
            result = f"error: {error}"
        return Observation(result if isinstance(result, str) else to_json(result).decode(), keys=keys)

    def _checked(self, call: ToolCall) -> dict[str, Any]:
        if call.name not in self._arguments:
            raise ToolError(f"expected the tool {' or '.join(self._arguments)}, found {call.name!r}")
        try:
            return self._arguments[call.name].validate_python(call.arguments)
        except ValidationError as bad:
            errors = [f"{'.'.join(map(str, error['loc']))}: {error['msg']}" for error in bad.errors()]
            raise ToolError(f"{call.name}: {'; '.join(errors)}") from None


def _arguments_of(method: Callable[..., Any]) -> TypeAdapter[dict[str, Any]]:
    hints = get_type_hints(method, include_extras=True)
    fields: dict[str, Any] = {}
    for name, parameter in inspect.signature(method).parameters.items():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            expected = "expected a tool whose arguments have names"
            raise TypeError(f"{method.__qualname__}: {expected}, found {parameter}")
        hint = hints.get(name, Any)
        fields[name] = hint if parameter.default is parameter.empty else NotRequired[hint]
    # A TypedDict checks the arguments as one object: missing, unknown and wrong ones are told together.
    arguments: Any = TypedDict(method.__name__, fields)  # type: ignore[operator]
    arguments.__pydantic_config__ = ConfigDict(extra="forbid")
    return TypeAdapter(arguments)


class _WithoutTitles(GenerateJsonSchema):
    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def _schema(method: Callable[..., Any], arguments: TypeAdapter[dict[str, Any]]) -> dict[str, Any]:
    parameters = arguments.json_schema(schema_generator=_WithoutTitles)
    del parameters["title"], parameters["additionalProperties"]  # words of every prompt
    what = inspect.getdoc(method) or ""
    function = {"name": method.__name__, "description": what, "parameters": parameters}
    return {"type": "function", "function": function}
