"""Text that a chat template writes after the assistant's turn: it must be an end of sequence."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from megatron_eqlen.hf.tokenizer import BREAK, THINKING, TemplateError, Tokenizer, read_arguments

ASKED, THOUGHT, SAID = "Which town?", "A thought of the policy.", "A turn that the policy generated."
TURN = f"<think>\n{THOUGHT}\n</think>\n\n{SAID}"
"""Stands for a turn where what follows it is rendered."""
QUESTION = {"role": "user", "content": ASKED}
TAKEN = {"role", "name", "tool_call_id"}
"""Keys of a turn that a chat template may leave out: the last two say what an answer of a tool belongs to."""


def require_end(tokenizer: Tokenizer, enable_thinking: bool | None = None) -> None:
    """Raise ValueError for a chat template that ends the assistant's turn with no end of sequence: responses
    would run on to their limit, and be trained; or that reads no ``enable_thinking``, if that is set."""
    if enable_thinking is not None and "enable_thinking" not in str(tokenizer.backend.chat_template):
        expected = f"expected a chat template that reads enable_thinking, found none in {tokenizer.folder}"
        raise ValueError(f"data.enable_thinking: {str(enable_thinking).lower()}: {expected}: leave it out")
    found = list[str]()
    for more in (), (QUESTION,):  # GLM's turns end with the next one's role, gpt-oss's last one otherwise
        messages: list[Any] = [QUESTION, {"role": "assistant", "content": SAID}, *more]
        text = tokenizer.render_chat(messages, enable_thinking, answer=bool(more))
        _, turn, after = text.rpartition(SAID)
        # Behind the turn, up to the next question if there is one.
        token_ids = tokenizer.encode((after.partition(ASKED)[0] if more else after).lstrip())
        if turn and {*token_ids[: None if more else 1]} & tokenizer.eos_token_ids:
            return
        found.append(after.strip()[:30] if turn else "a turn without its text")
    if found[0]:  # Falcon's writes nothing behind a turn
        ends = ", ".join(tokenizer.pieces_of(sorted(tokenizer.eos_token_ids)))
        expected = f"a chat template that ends the assistant's turn with an end of sequence ({ends})"
        remedy = "eos_token_id in generation_config.json takes a list, which may hold that token, too"
        raise ValueError(f"{tokenizer.folder}: expected {expected}, found {found[0]!r}: {remedy}")


def left_out(text: str, messages: Iterable[Mapping[str, Any]], thoughts: bool = False) -> str | None:
    """Return role, key and first text of ``messages`` that ``text``, a rendered chat, lacks; None if it has
    all contents and calls of tools; with ``thoughts``, which many templates drop, thinking and other keys."""
    plain = text.replace(BREAK, "")
    for message in messages:
        for key in message.keys() - TAKEN if thoughts else ("content", "tool_calls"):
            for said in _texts(message.get(key)):
                # Templates may write thinking apart from what is said, so each part is looked for alone.
                parts = re.split("|".join(THINKING), said.replace(BREAK, ""))
                for part in parts if thoughts or message["role"] != "assistant" else parts[-1:]:
                    # Arguments are written as JSON, with or without escapes.
                    forms = (json.dumps(part.strip(), ensure_ascii=escape)[1:-1] for escape in (True, False))
                    if part.strip() not in plain and not any(form in plain for form in forms):
                        return f"{message['role']}: {key}: {part.strip()[:80]!r}"
    return None


def _texts(value: Any) -> Iterator[str]:
    """Yield the texts of a value of a turn; of calls names and arguments alone."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        # ``{"type": "function", "function": {"name": ..., "arguments": ...}}``, or its inner part.
        value = value.get("function", value)
        if "arguments" in value:
            value = {"name": value.get("name"), "": read_arguments(value["arguments"])}
        for each in value.values():
            yield from _texts(each)
    elif isinstance(value, list):
        for each in value:
            yield from _texts(each)


def with_calls[R](
    answers: Sequence[Mapping[str, Any]],
    arguments: Mapping[str, Any],
    render: Callable[[list[dict[str, Any]]], R],
    plain_ids: bool = False,
) -> R:
    """Return what ``render`` makes of a turn that calls a tool for each of ``answers`` of the role ``tool``,
    and of these. Raises TemplateError for a template that takes no calls."""
    calls, said = list[dict[str, Any]](), []
    for message in map(dict, answers):
        if message["role"] == "tool":
            name, number = message.setdefault("name", "unknown"), len(calls)
            # Kimi's template shows ids as the policy writes them; Mistral's takes nine letters and digits
            id_ = message.get("tool_call_id", f"functions.{name}:{number}")
            message["tool_call_id"] = id_ = f"call{number:05}" if plain_ids else id_
            function = {"name": name, "arguments": dict(arguments)}
            calls.append({"id": id_, "type": "function", "function": function})
        said.append(message)
    try:
        return render([{"role": "assistant", "content": "", "tool_calls": calls}, *said])
    except TemplateError:
        if plain_ids:
            raise
        return with_calls(answers, arguments, render, plain_ids=True)
