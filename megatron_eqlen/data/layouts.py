r"""Layouts of data files: which columns hold the question and its answer, by what a file has.

The tables list names, the preferred ones first; a dot reaches into a record. The recipe's ``columns`` come
before them. To know another layout, add its names.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import islice
from pathlib import Path
from typing import Any

from megatron_eqlen.hf.tokenizer import Turn
from megatron_eqlen.rewards.math.grader import extract_answer

SAMPLED = 100
"""Records at a file's beginning that show its layout."""

QUESTIONS = (
    "question",  # ours, GSM8K, DeepMath-103K
    "problem",  # AIME, HMMT, MATH, NuminaMath, NeMo-RL
    "prompt",  # verl and DAPO-Math-17k (a chat), TRL, slime
    "messages",  # chats as OpenAI writes them
    "conversations",  # ShareGPT
    "input",  # OpenRLHF
    "query",
)
ANSWERS = (
    "answer",  # ours, GSM8K, AIME, NuminaMath
    "final_answer",  # DeepMath-103K
    "expected_answer",  # NeMo-RL
    "reward_model.ground_truth",  # verl, DAPO-Math-17k
    "ground_truth",
    "label",  # OpenRLHF, slime
    "gold",
    "target",
    "reference_answer",
    "correct_answer",
    "extra_info.answer",
    "solution",  # TRL, MATH: a whole solution, or the answer alone
)
BESIDE = ("choices", "options", "context", "passage", "body", "image", "images")
"""Columns without which a question may make no sense."""
OPTIONAL = ("grader", "difficulty", "instruction", "tests")
"""Columns that are read under our names alone."""
ROLES = {
    **{role: role for role in ("system", "user", "assistant", "tool")},
    **{"human": "user", "gpt": "assistant", "chatgpt": "assistant", "observation": "tool"},
}
"""Roles of a turn, as OpenAI and as ShareGPT write them."""
WRAPPINGS = (
    re.compile(
        r"Solve the following math problem step by step\. The last line of your response should be of the "
        r"form Answer: \$Answer \(without quotes\) where \$Answer is the answer to the problem\.\s*(.*?)\s*"
        r'Remember to put your answer on its own line after "Answer:"\.?\s*',
        re.DOTALL,
    ),  # DAPO-Math-17k
    re.compile(
        r"(.*?)\s*Let's think step by step and output the final answer after \"####\"\.?\s*", re.DOTALL
    ),  # verl's GSM8K
)
"""Instructions that data sets put around each question, for graders other than ours."""

_MISSING = object()
_FINAL = re.compile(r"(?:####|\banswer(?: is:?|:))\s*\$?([^\n]+?)\$?\.?\s*$", re.IGNORECASE)


@dataclass(frozen=True)
class Layout:
    """Places of our fields in a file's records."""

    file: Path
    places: Mapping[str, str]
    """Column or path of ``question`` (or ``messages``), ``answer``, ``grader`` and others, where there is
    one."""
    names: Sequence[str]
    """Columns of the file; those within a record with their path."""
    told: str = ""
    """Sentence on where question and answer come from; empty if they have our names."""

    def fields(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """Return a record's values under our names, of a missing column none."""
        values = {ours: value_at(record, place, _MISSING) for ours, place in self.places.items()}
        return {ours: value for ours, value in values.items() if value is not _MISSING}

    def missing(self, ours: str) -> str:
        """Return what is missing where a record has no ``question`` or ``answer``."""
        place = self.places.get(ours)
        known = {"question": QUESTIONS, "answer": ANSWERS}.get(ours, (ours,))
        expected = (
            repr(place) if place else f"{ours!r}" + f" or one of {', '.join(known[1:])}" * (len(known) > 1)
        )
        return f"expected {expected}, found {[*self.names]}; data.sources[].columns takes other names"


def find_layout(file: Path, records: Iterable[Any], columns: Mapping[str, str], grader: str | None) -> Layout:
    """Return the layout of a file, from its first ``records``. ``columns``: the recipe's, which come first;
    ``grader``: the recipe's. Raises ValueError for an entry of ``columns`` that cannot act."""
    sample = [record for record in islice(records, SAMPLED) if isinstance(record, dict)]
    names = [*dict.fromkeys(name for record in sample for name in _names(record))]
    if sample:
        _check_columns(file, columns, names, sample, grader)
    places = {name: name for name in OPTIONAL if _has(sample, name)} | dict(columns)
    if not {"question", "messages"} & columns.keys() and (place := _first(QUESTIONS, sample)):
        places["question"] = place
        if place != "messages" and _has(sample, "messages"):
            places["messages"] = "messages"  # for rows without a question
    if "answer" not in columns and (place := _first(ANSWERS, sample)):
        places["answer"] = place
    return Layout(file, places, names, _told(places, sample))


def value_at(record: Any, place: str, default: Any = None) -> Any:
    """Return the value at a column or path, ``default`` where there is none."""
    for key in (place,) if isinstance(record, dict) and place in record else place.split("."):
        record = record.get(key, default) if isinstance(record, dict) else default
    return record


def chat(value: Any) -> list[Turn]:
    """Return the turns of a chat as OpenAI or ShareGPT writes it. Raises ValueError that names the turn."""
    turns: list[Turn] = []
    for turn in value if isinstance(value, list) else [value]:
        record = turn if isinstance(turn, dict) else {}
        role = ROLES.get(str(record.get("role", record.get("from"))).lower())
        content = record.get("content", record.get("value"))
        if isinstance(content, list) and all(isinstance(part, dict) and "text" in part for part in content):
            content = "".join(str(part["text"]) for part in content)
        if role is None or not isinstance(content, str):
            expected = "role and content, or from and value,"
            raise ValueError(f"expected {expected} with a role of {', '.join(ROLES)}, found {turn!r:.200}")
        turns.append({"role": role, "content": content})
    return turns


def unwrapped(question: str) -> str | None:
    """Return the question without its data set's instruction (``WRAPPINGS``); None if it has none."""
    matches = (wrapping.fullmatch(question) for wrapping in WRAPPINGS)
    return next((match[1] for match in matches if match), None)


def final_answer(gold: str) -> str:
    r"""Return the answer at the end of a worked solution: in the last ``\boxed{}``, or after ``####`` (GSM8K)
    or ``The answer is:`` (MetaMathQA); of a list of one, written as JSON, that one. Other golds as they
    are."""
    if gold.startswith('["') and gold.endswith('"]') and '", "' not in gold:
        gold = gold[2:-2].replace("\\\\", "\\")
    if boxed := extract_answer(gold):
        return boxed
    return match[1] if (match := _FINAL.search(gold)) else gold


def _names(record: Mapping[str, Any]) -> Iterable[str]:
    for name, value in record.items():
        yield from [f"{name}.{below}" for below in value] if isinstance(value, dict) and value else [name]


def _first(known: Sequence[str], sample: Sequence[dict[str, Any]]) -> str | None:
    """Return the first of the ``known`` places, in capitals or not, at which a record of ``sample`` has a
    value, or else at which it has none."""
    spelt = {name.lower(): name for record in sample for name in (*record, *_names(record))}
    present = [spelt[name] for name in known if name in spelt]
    return next((name for name in present if _has(sample, name)), next(iter(present), None))


def _has(sample: Sequence[dict[str, Any]], place: str) -> bool:
    return any(value_at(record, place) is not None for record in sample)


def _check_columns(
    file: Path, columns: Mapping[str, str], names: Sequence[str], sample: Sequence[dict], grader: str | None
) -> None:
    for ours, place in columns.items():
        if not _has(sample, place):
            near = get_close_matches(place, names, 1)
            hint = f" (nearest: {near[0]!r})" if near else ""
            raise ValueError(
                f"{file}: columns: {ours}: {place!r} is in none of its first {len(sample)} rows{hint}: "
                f"expected one of {[*names]}"
            )
    graders = {grader or value_at(record, columns.get("grader", "grader")) or "math" for record in sample}
    useless = {
        "messages": "question" in columns and "columns has a question",
        "instruction": "messages" in columns and "a chat takes no instruction",
        "grader": grader is not None and f"the recipe's grader is {grader}",
        "tests": "code" not in graders and "no row's grader is code",
        "answer": graders == {"code"} and "tests grade code",
    }
    for ours, why in useless.items():
        if why and ours in columns:
            raise ValueError(f"{file}: columns: {ours}: {columns[ours]} has no effect: {why}")


def _told(places: Mapping[str, str], sample: Sequence[dict[str, Any]]) -> str:
    question = places.get("question", places.get("messages", ""))
    values = (value_at(record, question) for record in sample)
    kind = " (a chat, as it stands)" if any(isinstance(value, list) for value in values) else ""
    answer = places.get("answer", "")
    names = dict.fromkeys(name for record in sample for name in record)
    beside = [name for name in names if name.lower() in BESIDE and _has(sample, name)]
    unread = f"; not shown to the model: {', '.join(beside)}" if beside else ""
    ours = (question, kind) == ("question", "") and answer in ANSWERS[:2]
    if not question or (ours and not unread):
        return ""
    return f"question from {question}{kind}" + f", answer from {answer}" * bool(answer) + unread
