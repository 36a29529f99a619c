"""Calls of tools in the form of the model's family, which its chat template shows."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import dropwhile, takewhile, zip_longest
from typing import Any

from megatron_eqlen.engines.tool_parsers import find_parser, tool_parser
from megatron_eqlen.environments.tool_calls import ToolCall, ToolError, as_text, spoken, tool_calls
from megatron_eqlen.hf.tokenizer import THINKING, TemplateError, Tokenizer
from megatron_eqlen.hf.turns import QUESTION, with_calls
from megatron_eqlen.tokens import TokenIds

log = logging.getLogger(__name__)

CALL = ToolCall("find_town", {"town": "Oslo", "most": 3})
TYPES = {"town": {"type": "string"}, "most": {"type": "integer"}}
TOOL = {
    "type": "function",
    "function": {
        "name": CALL.name,
        "description": "Find a town.",
        "parameters": {"type": "object", "properties": TYPES, "required": [*TYPES]},
    },
}
TAG = re.compile(r"<[^<>\s]+>|\[[A-Z_]+\]")


def reader(
    tokenizer: Tokenizer, tools: Sequence[Mapping[str, Any]], enable_thinking: bool | None
) -> Callable[[TokenIds], str]:
    """Return what reads a turn: its text, with calls as Qwen3's. Raises ValueError where no parser does."""
    # A made-up tool shows how the template lists tools and writes their calls.
    prompt = tokenizer.render_chat([QUESTION], enable_thinking, [TOOL])
    if CALL.name not in prompt:
        wrong = "the chat template leaves tools out: prompts must say which there are"
        log.warning("%s: %s", tokenizer.folder, wrong)
    thinks, read = prompt.rstrip().endswith(THINKING[0]), _family(tokenizer, tools, enable_thinking, prompt)

    def text_of(token_ids: TokenIds) -> str:
        text = tokenizer.decode(token_ids)
        if thinks and THINKING[1] not in text:
            text = f"{THINKING[0]}\n{text}"  # which the prompt has begun, and which never closed
        return read(text)

    return text_of


def _family(
    tokenizer: Tokenizer, tools: Sequence[Mapping[str, Any]], enable_thinking: bool | None, prompt: str
) -> Callable[[str], str]:
    """Return what writes the calls of a turn anew; those of Qwen3 and Llama 3 stay as they are."""
    # ``opening``: what the template writes before a turn of the policy.
    shown, opening, why = "", prompt.rpartition(QUESTION["content"])[2], ""
    try:
        shown = with_calls(
            [{"role": "tool", "name": CALL.name}],
            CALL.arguments,
            lambda turns: tokenizer.render_chat([QUESTION, turns[0]], enable_thinking, [TOOL], answer=False),
        )
    except TemplateError as error:
        why = f" ({error})"
    _, _, shown = shown.rpartition(QUESTION["content"])
    if CALL.name not in shown:
        # No tools at all, or Qwen3's form in what the template says of them.
        if CALL.name not in prompt or "<tool_call>" in prompt:
            return str
        found = f"one that lists tools alone: the form of its calls is not known{why}"
        expected = "a chat template that writes calls of tools"
        raise ValueError(f"{tokenizer.folder}: expected {expected}, found {found}")
    # Tokens that open every turn are not the policy's: its call begins after them.
    both = zip_longest(tokenizer.encode(shown), tokenizer.encode(opening))
    own = dropwhile(lambda pair: pair[0] == pair[1], both)
    generated = (token for token, _ in own if token is not None)
    # generation stops at an end: GigaChat 3's call would come behind it
    shown = tokenizer.decode([*takewhile(lambda token: token not in tokenizer.eos_token_ids, generated)])
    # The template writes calls as Qwen3 or Llama 3 do: nothing is to be changed.
    with suppress(ToolError):
        if [call[:2] for call in tool_calls(shown)] == [CALL[:2]]:
            return str
    name = find_parser(tokenizer.backend, shown, TOOL, CALL[:2])
    if name is None:
        expected = "a chat template with calls of tools in a form that vLLM parses"
        found = f"{shown[-200:]!r} before the turn's end"
        raise ValueError(f"{tokenizer.folder}: expected {expected}, found {found}")
    before, _, after = shown.partition(CALL.name)
    # A call begins at the last tag before its name, ``[TOOL_CALLS]`` for example, or with the turn.
    parse, tags = tool_parser(name, tokenizer.backend, tools), TAG.findall(before)
    untagged = rf"\s*{re.escape(before.strip())}[\w.-]+{re.escape(after[:1])}"  # pythonic: [name(
    begin = re.compile(re.escape(tags[-1]) if tags else rf"\A{untagged}")

    def written_anew(text: str) -> str:
        said = spoken(text)
        head = text[: len(text) - len(said)]
        if calls := parse(said.strip()):
            return head + "\n".join(as_text(ToolCall(*call)) for call in calls)
        # A call that no parser reads is marked as one, so that the policy reads what is wrong with it.
        if (mark := begin.search(said)) is None:
            return text
        return f"{head}{said[: mark.start()]}<tool_call>{said[mark.end() :]}</tool_call>"

    return written_anew
