r"""Questions of your own or of others: one a line of a JSON Lines file, or a row of a parquet file.

``layouts.py`` has the names of columns that are recognised; the recipe's ``columns`` takes any
(docs/models_and_data.md). A chat is the prompt as it stands, without the recipe's instruction; a last turn of
the assistant is left out, and is the answer if there is no other. For ``math``, not for reward functions,
known instructions (``layouts.WRAPPINGS``) are taken off, and the gold is the end of a worked solution.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from megatron_eqlen.data.files import UNREAD, find_files, read_records
from megatron_eqlen.data.layouts import Layout, chat, final_answer, find_layout, unwrapped, value_at
from megatron_eqlen.data.rows import (
    DEMONSTRATION,
    BadRow,
    Problem,
    Tally,
    answer_field,
    code_row,
    number_field,
    numbered,
    optional_text_field,
    reading_tests,
    text_field,
)
from megatron_eqlen.graders.code.tests import CodeTests
from megatron_eqlen.graders.math.answer import normalize
from megatron_eqlen.hf.dataset_files import split_of
from megatron_eqlen.hf.tokenizer import Turn
from megatron_eqlen.recipe import DataRecipe
from megatron_eqlen.recipe.plugins import is_import_path
from megatron_eqlen.rewards.functions import RewardFunction, is_reward_function, kind_of, reference

GRADERS = ("math", "code")
_AIME_ANSWER = re.compile(r"(\d{1,3})(?:\\unit\{(?!base)[^{}]*\})?")
"""An integer from 0 to 999 in normal form, with or without a unit."""

_SHARE = re.compile(r"(\d{1,9})/([1-9]\d{0,8})")


def read(
    path: Path, tally: Tally, columns: Mapping[str, str] = MappingProxyType({}), grader: str | None = None
) -> Iterator[Problem]:
    """Yield the rows of a ``.jsonl``, ``.parquet`` or ``.json`` file, or of a folder of them. ``columns``:
    names of the file's columns by our names, where they differ; ``grader``: the recipe's, if it names one."""
    # A reward function gets the values that it asks for; a grader of the user's own gets the gold alone.
    named = grader is not None and is_import_path(grader) and is_reward_function(grader)
    function = RewardFunction(grader, "grader") if grader is not None and named else None
    files = find_files(path, "*.jsonl *.parquet", "*.json")
    # train and test in one folder would leak
    splits = {split_of(file.relative_to(path).as_posix() if file != path else "") for file in files}
    if len(splits) > 1:
        found = ", ".join(sorted(splits))
        raise ValueError(f"{path}: expected files of one split, found {found}: name it, split: train")
    if others := [each.name for each in path.rglob("*") if each.suffix in UNREAD or not each.exists()]:
        tally.note(f"not read: {', '.join(sorted(others)[:5])}")
    for file in files:
        layout = find_layout(file, read_records(file, (), None), columns, grader)
        tally.note(layout.note)
        # only the columns that are read: a parquet file may hold long others
        extra = function.columns(layout.names) if function else ()
        places = (place for each in layout.places.values() for place in each)
        wanted = dict.fromkeys(name for each in (*places, *extra) for name in (each, each.partition(".")[0]))
        for row_id, record in numbered(path, file, read_records(file, (), wanted)):
            try:
                yield _row(row_id, record, layout, grader, function)
            except BadRow as bad:
                tally.drop(f"{path}: {row_id}", bad.reason, bad.detail)


def read_aime(path: Path, tally: Tally, **settings: Any) -> Iterator[Problem]:
    """Yield the rows of an AIME, as ``read``. Golds are 0 to 999: ``070`` and ``70^\\circ`` are both 70."""
    for row in read(path, tally, **settings):
        if integer := _AIME_ANSWER.fullmatch(normalize(row.gold)):
            yield replace(row, gold=integer[1])
        else:
            tally.drop(f"{path}: {row.row_id}", "not_an_aime_answer", f"expected 0..999, found {row.gold!r}")


def _row(
    row_id: str, record: Any, layout: Layout, named: str | None, function: RewardFunction | None
) -> Problem:
    if not isinstance(record, dict):
        hint = " (a file that is one list is named .json)" if isinstance(record, list) else ""
        raise BadRow("wrong_type", f"expected a record, found {type(record).__name__}{hint}")
    try:
        fields = layout.fields(record)
    except ValueError as error:
        raise BadRow("two_questions", str(error)) from None
    grader = named or fields.get("grader") or "math"
    if named is None and grader not in GRADERS:
        raise BadRow("unknown_grader", f"expected one of {GRADERS}, found {grader!r}")
    messages = _take_chat(fields, grader)
    if "question" not in fields:
        raise BadRow("missing_column", layout.missing("question"))
    question = text_field(fields, "question")
    # The data set's instruction is for another grader's form of answer.
    last = messages[-1]["content"] if messages else question
    if grader == "math" and (bare := unwrapped(last)):
        question = question.removesuffix(last) + bare
        if not (messages and messages[1:]):
            messages = fields["instruction"] = None
        else:  # the turns before it stay, and the last one asks as the grader reads
            asks = DataRecipe.model_fields["instruction"].default
            messages = (*messages[:-1], {**messages[-1], "content": f"{bare}\n\n{asks}"})
    instruction = optional_text_field(fields, "instruction")
    difficulty = _difficulty(fields)
    if grader == "code":
        if "tests" not in fields:
            raise BadRow("missing_column", layout.missing("tests"))
        with reading_tests():
            tests = CodeTests.from_fields(fields["tests"])
        return replace(code_row(row_id, question, tests, difficulty, instruction), messages=messages)
    if "answer" not in fields and (function is None or function.needs_gold):
        raise BadRow("missing_column", layout.missing("answer"))
    gold = _gold(fields, grader) if function is None else _reference(fields, record, layout, function)
    return Problem(row_id, question, gold, grader, difficulty, instruction, messages=messages)


def _take_chat(fields: dict[str, Any], grader: str) -> tuple[Turn, ...] | None:
    """Return the turns of a question that is a chat, and put its text, and perhaps its last reply as the
    answer, in ``fields``; None for another question."""
    asked = fields.get("question")
    if not isinstance(asked, list | dict):
        return None
    messages, reply = _chat(asked)
    # The question as text, for filters and reward functions; the prompt is made of the turns.
    said = [f"{turn['role']}: {turn['content']}" for turn in messages]
    fields |= {"question": "\n\n".join(said) if said[1:] else messages[0]["content"], "instruction": ""}
    if grader == DEMONSTRATION:
        messages, fields["answer"] = _demonstration(messages, reply, fields.get("answer"), asked)
    elif reply is not None and fields.get("answer") is None:
        fields["answer"] = reply
    return messages


def _chat(value: Any) -> tuple[tuple[Turn, ...], str | None]:
    """Return the turns before the assistant's last one, and that one's text. Raises BadRow."""
    try:
        messages = tuple(chat(value))
    except ValueError as error:
        raise BadRow("bad_messages", str(error)) from None
    reply = messages[-1]["content"] if messages and messages[-1]["role"] == "assistant" else None
    messages = messages if reply is None else messages[:-1]
    if not messages or messages[-1]["role"] not in ("user", "tool"):
        raise BadRow("bad_messages", f"expected turns that end with the user's, found {value!r:.200}")
    return messages, reply


def _demonstration(
    messages: tuple[Turn, ...], reply: str | None, answer: Any, asked: Any
) -> tuple[tuple[Turn, ...], str]:
    """Return all turns, and the last one's text, from the chat or the answers. Raises BadRow without one."""
    # With all keys of the turn, such as its calls of tools.
    if reply is not None:
        last = chat(asked)[-1]
        return (*messages, last), reply or str(last)
    if answer is None:
        raise BadRow("no_response", f"expected turns that end with the assistant's, found {asked!r:.200}")
    text = answer_field({"answer": answer}, "answer")
    return (*messages, {"role": "assistant", "content": text}), text


def _gold(fields: dict[str, Any], grader: str) -> str:
    golds = fields["answer"]
    if grader == "math" and isinstance(golds, list) and len(golds) > 1:  # the roots 1 and -1
        golds = ", ".join(answer_field({"answer": gold}, "answer") for gold in golds)
    gold = answer_field({"answer": golds}, "answer")
    return final_answer(gold) if grader == "math" else gold


def _reference(fields: dict[str, Any], record: Any, layout: Layout, function: RewardFunction) -> str:
    """Return the gold with the values that the function's parameters name. Question and answer are known
    otherwise where a row has none of this name, or where the recipe's ``columns`` take another column."""
    extra = {name: value_at(record, name) for name in function.columns([*layout.names, *record])}
    for name in filter(kind_of, [*extra]):
        if extra[name] is None or name not in layout.places.get(name, (name,)):
            del extra[name]
    return reference(fields.get("answer", ""), extra)


def _difficulty(fields: dict[str, Any]) -> float | None:
    """Return the row's difficulty, ``7/8`` as 0.875 (POLARIS); None for words, which no filter compares."""
    value = fields.get("difficulty")
    if isinstance(value, str):
        share = _SHARE.fullmatch(value)
        return int(share[1]) / int(share[2]) if share else None
    # pandas writes NaN where there is none
    return None if value != value else number_field(fields, "difficulty")
