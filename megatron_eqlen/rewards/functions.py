"""A user's reward function, named by import path. The names of its parameters say what it gets: those of
verl, TRL, OpenRLHF and verifiers (``NAMES``), or columns of the data file; in the plural a list of one."""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import os
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from decimal import Decimal
from functools import cache, partial
from numbers import Real
from threading import Thread
from typing import Any

from megatron_eqlen.processes.failures import PAUSES, fault_of, retried
from megatron_eqlen.recipe.plugins import load_object
from megatron_eqlen.types import Grade, Prompt, TokenIds

NAMES = {
    "completion": ("completion", "response", "solution_str", "predict_str", "prediction", "output", "text"),
    "query": ("queries",),
    "question": ("question", "prompt", "problem", "input"),
    "gold": ("answer", "gold", "ground_truth", "label", "target", "reference", "expected", "expected_answer",
             "gold_answer", "correct_answer", "reference_answer", "solution"),
    "source": ("data_source", "task"),
    "info": ("extra_info", "info", "metadata"),
    "tokens": ("completion_id",),
    "state": ("state",),
}  # fmt: skip
"""Names of parameters by what they get, in the singular: the response; the question and the response
(OpenRLHF); the question; the gold answer; the source's name; an empty record, where the file has none; the
response's token ids; all of this (verifiers' ``state``)."""
KINDS = {name: kind for kind, names in NAMES.items() for name in names}
OF_A_RESPONSE = ("completion", "query")
LISTS = {"completions", "queries", "solution_strs", "responses"}
NUMBER_KEYS = ("score", "reward", "rewards")
"""Keys of the reward where a function returns a record (verl: ``score``, OpenRLHF: ``rewards``)."""
PACKED = '{"eqlen_gold": '
"""Beginning of a gold that also holds columns."""


def reference(gold: Any, columns: Mapping[str, Any]) -> str:
    """Return ``Prompt.gold`` for a reward function: the gold, and the columns of the file that it names."""
    if isinstance(gold, str) and not columns:
        return gold
    return json.dumps({"eqlen_gold": gold, "columns": dict(columns)}, default=str)


def referred(text: str) -> tuple[Any, dict[str, Any]]:
    """Return the gold and the columns in ``Prompt.gold``, the inverse of ``reference``."""
    if not text.startswith(PACKED):
        return text, {}
    packed = json.loads(text)
    return packed["eqlen_gold"], packed["columns"]


class _Misfit(ValueError):
    """A parameter that nothing is known for, or a result that is no reward."""


class RewardFunction:
    """The function at ``path``; ``key``: the recipe's. Raises ValueError if it takes no response."""

    def __init__(self, path: str, key: str) -> None:
        self.path = path
        self._function: Callable[..., Any] = load_object(path, key)
        parameters = _parameters(self._function, path, key)
        self._named = _by_name(parameters)
        self._everything = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
        self._in_lists = not LISTS.isdisjoint(self._named)
        """True if the function grades a batch, as in TRL and OpenRLHF."""
        self._is_chat: bool | None = None
        """True if the function takes the response as messages, None if that is not known yet."""
        self._pauses: Sequence[float] = PAUSES  # none after a failure: a dead service costs no time
        if not _takes_response(parameters):
            raise ValueError(_not_a_reward(parameters, path, key))

    @property
    def needs_gold(self) -> bool:
        """True if a row without an answer cannot be graded."""
        return any(kind_of(name) == "gold" and one.default is one.empty for name, one in self._named.items())

    def columns(self, names: Sequence[str]) -> list[str]:
        """Return those of a file's columns that the function gets: all with ``**kwargs``. Raises ValueError
        for a parameter without a default that gets nothing."""
        top = dict.fromkeys(name.partition(".")[0] for name in names)
        for name, one in self._named.items():
            if one.default is one.empty and not kind_of(name) and not {name, name.removesuffix("s")} & {*top}:
                raise ValueError(f"{self.path}: {_no_value(name, top)}")
        wanted = {name for name in self._named if kind_of(name) not in OF_A_RESPONSE}
        return [name for name in top if self._everything or {name, f"{name}s"} & wanted]

    def grade(self, prompt: Prompt, completion: str, token_ids: Sequence[int] | TokenIds = ()) -> Grade:
        """Return the grade of a response. Raises ValueError for its error, or for no finite number."""
        started = time.monotonic()
        pauses, self._pauses = self._pauses, ()
        with own_code(self.path):
            returned = retried(partial(self._call, prompt, completion, token_ids), pauses)
            self._pauses = PAUSES
            rewards = _named(returned)
            reward = 0.0 if rewards else _number(returned)
        verdict = "not_applicable" if reward is None else "scored"
        return Grade(reward or 0.0, verdict, None, self.path, time.monotonic() - started, rewards=rewards)

    def _call(self, prompt: Prompt, completion: str, token_ids: Sequence[int] | TokenIds) -> Any:
        """Call the function with the response as text, or, if it fails on text alone, with messages."""
        messages = [{"role": "assistant", "content": completion}]
        # TRL calls a function with messages where the prompts of the data file are messages
        unknown = self._is_chat is None and self._in_lists
        if unknown and isinstance(referred(prompt.gold)[1].get("prompt"), list):
            self._is_chat = True
        if self._is_chat:
            return self._called(prompt, messages, token_ids)
        try:
            returned = self._called(prompt, completion, token_ids)
        except (TypeError, IndexError, AttributeError):
            if self._is_chat is False:  # text has worked before
                raise
            returned = None
            with suppress(Exception):  # the user's code may raise anything; the first error is raised
                returned = self._called(prompt, messages, token_ids)
            if returned is None:
                raise
            # a function of text that fails on empty text may take messages all the same
            self._is_chat = True if completion else None
        # an empty response shows nothing: a loop over its messages does not fail
        if self._is_chat is None and completion:
            self._is_chat = False
        return returned

    def _called(
        self, prompt: Prompt, completion: str | list[dict[str, str]], token_ids: Sequence[int] | TokenIds
    ) -> Any:
        gold, columns = referred(prompt.gold)
        text = completion if isinstance(completion, str) else completion[0]["content"]
        values: dict[str, Any] = {
            "completion": completion,
            "query": prompt.question + text,
            "question": prompt.question,
            "gold": gold,
            "source": prompt.source,
            "info": {},
            "tokens": [*map(int, token_ids)],
        }
        # verifiers' functions look up anything in `state`: all names that we know, and all columns
        values["state"] = {name: values[kind] for name, kind in KINDS.items() if kind != "state"} | columns
        given = {name: _value(name, values, columns, self._in_lists) for name in self._named}
        # `**kwargs` gets the question and the gold as verifiers names them, and all columns of the file
        if self._everything:
            others = {"prompt": values["question"], "answer": gold} | columns
            # nothing but **kwargs: the response needs a name
            if not given:
                others["completion"] = completion
            listed = {name: [value] if self._in_lists else value for name, value in others.items()}
            given = listed | given
        filled = {name: value for name, value in given.items() if value is not inspect.Parameter.empty}
        required = [name for name, one in self._named.items() if one.default is one.empty]
        if missing := [name for name in required if name not in filled]:
            raise _Misfit(_no_value(missing[0], columns))
        # parameters before a `/` have no names for the caller
        ordered = (name for name, one in self._named.items() if one.kind is one.POSITIONAL_ONLY)
        first = [filled.pop(name) for name in ordered if name in filled]
        returned = self._function(*first, **filled)
        if not inspect.iscoroutine(returned):
            return returned
        result, error = asyncio.run_coroutine_threadsafe(_ended(returned), _loop(os.getpid())).result()
        if error is not None:
            raise error
        return result


@cache
def _loop(process: int) -> asyncio.AbstractEventLoop:
    """Return the loop of a process's async rewards: a client that they share belongs to one loop, and a
    notebook's own thread runs another. No exit waits for its thread."""
    loop = asyncio.new_event_loop()
    Thread(target=loop.run_forever, name="rewards", daemon=True).start()
    return loop


async def _ended(work: Coroutine[Any, Any, Any]) -> tuple[Any, BaseException | None]:
    """Return the result or the error: SystemExit, raised in a coroutine, would end its loop."""
    try:
        return await work, None
    except BaseException as error:  # noqa: BLE001  a user's code
        return None, error


@contextmanager
def own_code(path: str) -> Iterator[None]:
    """Make an error of the user's own code at the import path ``path`` a ValueError that names its line."""
    try:
        yield
    except _Misfit as error:
        raise ValueError(f"{path}: {error}") from None
    except (KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:  # of sys.exit, asyncio, libraries of time limits
        raise ValueError(f"{path}: {fault_of(error)}") from error


def is_reward_function(path: str, key: str = "grader") -> bool:
    """Return True if ``path`` names a function of a response, False for a factory of graders: a class, or a
    function of the recipe's ``reward`` section (and ``seed``) alone. Raises ValueError for others."""
    loaded = load_object(path, key)
    if inspect.isclass(loaded):
        if "__call__" in vars(loaded):
            module, _, name = path.partition(":")
            remedy = f"write `reward = {name}()` below it and name {module}:reward"
            expected = "expected a function or an instance, found a class to be called"
            raise ValueError(f"{key}: {path}: {expected}: {remedy}")
        return False
    parameters = _parameters(loaded, path, key)
    if _takes_response(parameters):
        return True
    # a factory needs the `reward` section, and besides it at most `seed`
    given = _by_name(parameters).values()
    required = [one.name for one in given if one.default is one.empty and one.name != "seed"]
    if len(required) != 1:
        raise ValueError(_not_a_reward(parameters, path, key))
    return False


def _parameters(function: Callable[..., Any], path: str, key: str) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        raise ValueError(f"{key}: {path}: expected a function whose parameters have names") from None


def _by_name(parameters: Mapping[str, inspect.Parameter]) -> dict[str, inspect.Parameter]:
    """Return the parameters without ``*args`` and ``**kwargs``."""
    others = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return {name: one for name, one in parameters.items() if one.kind not in others}


def _takes_response(parameters: Mapping[str, inspect.Parameter]) -> bool:
    only_keywords = [one.kind for one in parameters.values()] == [inspect.Parameter.VAR_KEYWORD]
    return only_keywords or any(kind_of(name) in OF_A_RESPONSE for name in parameters)


def _not_a_reward(parameters: Mapping[str, inspect.Parameter], path: str, key: str) -> str:
    names = (name for kind in OF_A_RESPONSE for name in NAMES[kind])
    expected = f"expected a parameter that takes the response, one of {', '.join(names)}"
    found = f"found ({', '.join(parameters)}): arguments are given by name (docs/extending.md)"
    return f"{key}: {path}: {expected}, {found}"


def kind_of(name: str) -> str | None:
    """Return what a parameter gets, by its name in the singular or plural."""
    return KINDS.get(name) or KINDS.get(name.removesuffix("s"))


def _value(name: str, values: Mapping[str, Any], columns: Mapping[str, Any], in_lists: bool) -> Any:
    """Return the value of a parameter, ``Parameter.empty`` if there is none. A column of the file comes
    before a value that we know by the same name, except for the response."""
    kind, singular = kind_of(name), name if name in KINDS else name.removesuffix("s")
    if kind not in OF_A_RESPONSE:
        # `labels` is the file's column of that name, or else its column `label` in a list of one
        for column in (name, singular):
            if column in columns:
                return [columns[column]] if in_lists or column != name else columns[column]
    if kind is None:
        return inspect.Parameter.empty
    return [values[kind]] if singular != name or in_lists else values[kind]


def _no_value(name: str, columns: Iterable[str]) -> str:
    return (
        f"no value for the parameter {name!r}: expected a column of the data file "
        f"({', '.join(columns) or 'none is read here'}), or a name such as "
        f"{', '.join(names[0] for names in NAMES.values())}"
    )


def _named(returned: Any) -> dict[str, float]:
    """Return named rewards of what a function returned, {} for one. Raises ValueError if not finite."""
    record = returned[0] if isinstance(returned, list | tuple) and len(returned) == 1 else returned
    if not isinstance(record, Mapping) or any(key in record for key in NUMBER_KEYS):
        return {}
    rewards: dict[str, float] = {}
    for name, value in record.items():
        try:
            rewards[str(name)] = _number(value) or 0.0
        except _Misfit as error:
            raise _Misfit(f"{name}: {error}") from None
    return rewards


def _number(returned: Any) -> float | None:
    """Return the finite number in what a function returned, None for TRL's ``[None]``. Raises ValueError."""
    value: Any = returned
    for _ in range(2):  # verl's batches are lists of records, OpenRLHF returns a record of tensors
        if isinstance(value, Mapping):
            value = next((value[key] for key in NUMBER_KEYS if key in value), value)
        if (tolist := getattr(value, "tolist", None)) is not None:  # of an array or a tensor
            value = tolist()
        if isinstance(value, list | tuple) and len(value) == 1:
            if value[0] is None:
                return None
            value = value[0]
    with suppress(OverflowError, ValueError):  # an integer beyond floats; a Decimal that signals
        if isinstance(value, Real | Decimal) and math.isfinite(value):
            return float(value)
    raise _Misfit(f"expected a finite number as reward, got {returned!r:.200}")
