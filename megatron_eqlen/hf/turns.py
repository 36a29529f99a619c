"""What a chat template writes after the assistant's turn, which must be an end of sequence."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from megatron_eqlen.hf.tokenizer import Tokenizer

ASKED, THOUGHT, SAID = "Which town?", "A thought of the policy.", "A turn that the policy generated."
TURN = f"<think>\n{THOUGHT}\n</think>\n\n{SAID}"
"""Stands for a turn where what follows it is rendered."""
QUESTION = {"role": "user", "content": ASKED}
CALL_ID = "call00000"
"""Mistral's template takes nine letters and digits."""


def require_end(tokenizer: Tokenizer, enable_thinking: bool | None = None) -> None:
    """Raise ValueError for a chat template that ends the assistant's turn with a text that is no end of
    sequence: responses would run on past it, to their limit, and be trained."""
    found = list[str]()
    for more in (), (QUESTION,):  # GLM's turns end with the next one's role, gpt-oss's last one otherwise
        messages: list[Any] = [QUESTION, {"role": "assistant", "content": SAID}, *more]
        text = tokenizer.render_chat(messages, enable_thinking, answer=bool(more))
        _, turn, after = text.rpartition(SAID)
        token_ids = tokenizer.encode((after.partition(ASKED)[0] if more else after).lstrip())
        if turn and {*token_ids[: None if more else 1]} & tokenizer.eos_token_ids:
            return
        found.append(after.strip()[:30] if turn else "a turn without its text")
    if found[0]:  # Falcon's writes nothing behind a turn
        ends = ", ".join(tokenizer.pieces_of(sorted(tokenizer.eos_token_ids)))
        raise ValueError(
            f"{tokenizer.folder}: expected a chat template that ends the assistant's turn with an end of "
            f"sequence ({ends}), found {found[0]!r}: eos_token_id in generation_config.json takes a list, "
            "which may hold that token, too"
        )


def with_calls[R](name: str, arguments: Mapping[str, Any], render: Callable[[dict[str, Any]], R]) -> R:
    """Return what ``render`` makes of a turn that calls a tool. Raises TemplateError for a template that
    takes none."""
    call = {"id": CALL_ID, "type": "function", "function": {"name": name, "arguments": dict(arguments)}}
    return render({"role": "assistant", "content": "", "tool_calls": [call]})
