"""The environments that a recipe names, and the chat template's words around what they say."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

from megatron_eqlen.environments.agent import Agent
from megatron_eqlen.environments.call_forms import reader
from megatron_eqlen.environments.conversation import Conversations
from megatron_eqlen.environments.environment import Environment, Observation
from megatron_eqlen.environments.tool_calls import ToolEnvironment
from megatron_eqlen.hf.tokenizer import BREAK, TemplateError, Tokenizer
from megatron_eqlen.hf.turns import QUESTION, SAID, THOUGHT, TURN, left_out, with_calls
from megatron_eqlen.recipe import Recipe
from megatron_eqlen.recipe.load import typed_options
from megatron_eqlen.recipe.plugins import load_object
from megatron_eqlen.recipe.schema import ENVIRONMENTS
from megatron_eqlen.rewards.functions import referred
from megatron_eqlen.types import Prompt


def environment_class(recipe: Recipe) -> type[Environment]:
    """Return the class that ``environment.name`` names. Raises ValueError if it does not fit the recipe."""
    section = recipe.environment
    assert section.name is not None
    path = ENVIRONMENTS.get(section.name, section.name)
    cls = load_object(path, "environment.name")
    if not (inspect.isclass(cls) and issubclass(cls, Environment)):
        base = f"{Environment.__module__}.{Environment.__qualname__}"
        raise ValueError(f"environment.name: {path}: expected a subclass of {base}, found {cls!r}")
    if cls.step is Environment.step:
        raise ValueError(f"environment.name: {path}: expected a class with a method step, found none")
    try:
        inspect.signature(cls).bind(None, 0, **section.options)
    except TypeError as error:
        raise ValueError(f"environment.options: {path}(prompt, seed, **options): {error}") from None
    # A single pair needs no fork: both tracks start at the prompt.
    pairs = recipe.sampling == "equal_length" and recipe.equal_length.max_pairs != 1
    if (pairs or recipe.sampling == "tree") and not cls.copies:
        remedy = "sampling: independent, or sampling: equal_length with equal_length.max_pairs: 1"
        why = f"{path} cannot be copied, and sampling: {recipe.sampling} forks"
        raise ValueError(f"environment.name: {why}: set {remedy}")
    return cls


def tools(recipe: Recipe) -> Sequence[Mapping[str, Any]]:
    """Return the JSON schemas of the tools of the recipe's environment; none without one."""
    return environment_class(recipe).schemas(**_options(recipe)) if recipe.environment.name else ()


def _options(recipe: Recipe) -> dict[str, Any]:
    """Return the options as the class declares them: a recipe has what YAML can say of a ``Path``."""
    options = recipe.environment.options
    return options | typed_options(str(recipe.environment.name), options, "python")


def conversations(recipe: Recipe, tokenizer: Tokenizer) -> Conversations | None:
    """Return how a harvest speaks with the recipe's environment, if any. ValueError where it does not fit."""
    section = recipe.environment
    if section.name is None:
        return None
    cls, thinking, options = environment_class(recipe), recipe.data.enable_thinking, _options(recipe)
    cls.start(**options)
    schemas = cls.schemas(**options)

    def make(prompt: Prompt, seed: int) -> Environment:
        gold, _ = referred(prompt.gold)  # a reward function's may hold columns
        plain = gold if isinstance(gold, str) else json.dumps(gold)
        # options that one environment changes are its own
        made = cls(replace(prompt, gold=plain), seed, **deepcopy(options))  # type: ignore[call-arg]
        if (opening := made.opening()) is not None:
            try:
                refuse_other_prompt(tokenizer, prompt, *opening, thinking)
            except BaseException:
                made.close()
                raise
        return made

    def write(observation: Observation) -> list[int]:
        most = section.max_given_tokens
        # So many characters hold more than ``most`` tokens: what is longer need not be encoded whole.
        begin = beginning(observation, most, tokenizer.longest * (most + 1))
        given = given_tokens(tokenizer, begin, schemas, thinking)
        if len(given) > most:  # the response has ended, and nobody reads them
            return given
        whole = replace(observation, messages=tuple(observation.messages))
        return given if begin == whole else given_tokens(tokenizer, whole, schemas, thinking)

    calls = issubclass(cls, ToolEnvironment | Agent) and schemas
    read = reader(tokenizer, schemas, thinking) if calls else tokenizer.decode
    try:  # an unfit template is refused before anything is generated
        write(Observation("content"))
    except ValueError:
        if issubclass(cls, ToolEnvironment):
            raise
        write(Observation("content", role="user"))
    return Conversations(make, read, write, section, cls.end)


def beginning(observation: Observation, messages: int, characters: int) -> Observation:
    """Return an observation with so much of its messages, and of the text of each."""
    said = [
        {**message, "content": text[:characters]}
        if isinstance(text := message.get("content"), str)
        else message
        for message in observation.messages[: messages + 1]
    ]
    return replace(observation, content=observation.content[:characters], messages=tuple(said))


def given_tokens(
    tokenizer: Tokenizer,
    observation: Observation,
    tools: Sequence[Mapping[str, Any]] = (),
    enable_thinking: bool | None = None,
) -> list[int]:
    """Return the tokens between a turn's last token and the first one of the next turn.

    Raises ValueError for a chat template that changes earlier turns, since generated text must stay (Qwen3's
    drops thinking once a ``user`` speaks, not before a ``tool``), or leaves out messages (Zephyr's a tool's).
    """
    single = {"role": observation.role, "content": observation.content, **observation.keys}
    said = observation.messages or [single]
    ends = re.compile("|".join(map(re.escape, tokenizer.pieces_of([*tokenizer.eos_token_ids]))))

    def rendered(messages: Sequence[Any]) -> str:
        return tokenizer.render_chat([QUESTION, *messages], enable_thinking, tools)

    failed: ValueError | None = None
    found: list[int] = []
    # of Mistral, gpt-oss and Gemma 4 a tool answers a call alone; DeepSeek 3.2's answers depend on the calls
    for calls in (False, True)[: 1 + any(message["role"] == "tool" for message in said)]:
        try:
            if calls:
                text = with_calls(said, {"a": THOUGHT, "b": SAID}, rendered)
            else:
                text = rendered([{"role": "assistant", "content": TURN}, *said])
        except TemplateError as error:
            failed = failed or error
            continue
        # What the template writes behind the turn's last words, which may be said again.
        before, _, after = text.partition(SAID)
        if found and THOUGHT not in before:
            break  # the template writes no calls
        if THOUGHT not in before:
            keeps = "keeps the assistant's turns as they are before a message of the role"
            wrong = f"{keeps} {said[-1]['role']!r}, found one that changes them"
            raise failed or ValueError(f"{tokenizer.folder}: expected a chat template that {wrong}")
        if calls and (end := ends.search(after)):  # behind the call's arguments
            after = after[end.start() :]
        token_ids = tokenizer.encode(after.lstrip())
        # The first token must be the end of sequence, which the policy generates itself.
        if lost := left_out(after, said):
            wrong = f"writes all messages, found one that leaves out {lost}"
        elif len(token_ids) < 2 or token_ids[0] not in tokenizer.eos_token_ids:
            end = f"an end of sequence ({sorted(tokenizer.eos_token_ids)})"
            wrong = f"ends the assistant's turn with {end} and goes on, found {token_ids[:2]}"
        else:
            found = token_ids[1:]
            continue
        failed = failed or ValueError(f"{tokenizer.folder}: expected a chat template that {wrong}")
    if not found:
        assert failed is not None
        raise failed
    return found


def refuse_other_prompt(
    tokenizer: Tokenizer,
    prompt: Prompt,
    messages: Sequence[Any],
    tools: Sequence[Mapping[str, Any]],
    enable_thinking: bool | None,
) -> None:
    """Raise ValueError unless the messages of an agent's first request are the prompt."""
    found = tokenizer.render_chat([*messages], enable_thinking, tools)
    # A longer text cannot be the prompt, and is not encoded.
    longest = tokenizer.longest * len(prompt.token_ids)
    if len(found) > longest or tokenizer.encode(found) != prompt.token_ids:
        keys = "data.instruction, data.instruction_role, and environment.options: tools"
        expected, found = tokenizer.decode(prompt.token_ids), found.replace(BREAK, "")
        wrong = f"expected the prompt, {expected!r}, found {found!r:.1000}"
        raise ValueError(f"first request: {wrong}: see {keys}")
