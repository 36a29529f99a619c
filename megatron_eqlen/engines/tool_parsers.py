"""vLLM's parsers of tools' calls: it has one for each family of models."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Parse = Callable[[str], list[tuple[str, dict[str, Any], str | None]]]
"""Text of a turn -> its calls' names, arguments and ids, where it has them; none where it is unreadable."""


def find_parser(
    tokenizer: Any, text: str, tool: Mapping[str, Any], call: tuple[str, dict[str, Any]]
) -> str | None:
    """Return the name of a parser that reads ``text`` as this ``call`` of ``tool``; None if none does."""
    from vllm.tool_parsers import ToolParserManager

    # each call that is none is an error there
    logging.getLogger("vllm.tool_parsers").setLevel(logging.CRITICAL)
    for name in sorted(ToolParserManager.list_registered()):
        try:
            if [found[:2] for found in tool_parser(name, tokenizer, [tool])(text)] == [call]:
                return name
        except Exception:  # noqa: BLE001  each raises its own where the text or the tokenizer is not its family's
            continue
    return None


def tool_parser(name: str, tokenizer: Any, tools: Sequence[Mapping[str, Any]]) -> Parse:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.tool_parsers import ToolParserManager

    asked = {"messages": [{"role": "user", "content": ""}], "model": "policy", "tools": [*tools]}
    request = ChatCompletionRequest.model_validate(asked)
    parser = ToolParserManager.get_tool_parser(name)

    def parse(text: str) -> list[tuple[str, dict[str, Any], str | None]]:
        # a new one each time: a parser keeps what it has read
        found = parser(tokenizer, [*(request.tools or ())]).extract_tool_calls(text, request)
        calls = []
        for call in found.tool_calls:
            try:
                arguments = json.loads(call.function.arguments)
            except (ValueError, RecursionError):  # Kimi's are not looked into
                return []
            if isinstance(arguments, dict):
                calls.append((call.function.name, arguments, call.id if call.id in text else None))
        return calls

    return parse
