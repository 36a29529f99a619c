"""A question as a chat prompt, by the model's own template."""

from __future__ import annotations

from typing import Literal

from megatron_eqlen.hf.tokenizer import Message, Tokenizer

InstructionRole = Literal["user", "system", "none"]


def format_prompt(
    tokenizer: Tokenizer,
    question: str,
    instruction: str = "",
    instruction_role: InstructionRole = "user",
    enable_thinking: bool | None = None,
) -> list[int]:
    """Return the token ids of ``question``, ready for the assistant's answer.

    ``user`` puts the instruction after the question in the same turn (Qwen's model cards), ``system`` into a
    turn of its own before it (DeepMath's authors). ``enable_thinking`` is passed to the template where set.
    """
    messages = chat_messages(question, instruction, instruction_role)
    return tokenizer.apply_chat_template(messages, enable_thinking)


def chat_messages(question: str, instruction: str, instruction_role: InstructionRole) -> list[Message]:
    if not instruction or instruction_role == "none":
        return [{"role": "user", "content": question}]
    if instruction_role == "user":
        return [{"role": "user", "content": f"{question}\n\n{instruction}"}]
    return [{"role": "system", "content": instruction}, {"role": "user", "content": question}]
