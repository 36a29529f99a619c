r"""Layouts of data files: which columns hold question and answer. The tables list names, the preferred ones
first; a dot reaches into a record. The recipe's ``columns`` come first. To know another layout, add names."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import islice
from pathlib import Path
from typing import Any

from megatron_eqlen.data.files import parse_json
from megatron_eqlen.data.rows import DEMONSTRATION
from megatron_eqlen.graders.math.grader import extract_answer
from megatron_eqlen.hf.tokenizer import Turn

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
BESIDE = (
    "system", "system_prompt", "tools", "functions", "choices", "options", "context", "passage", "body",
    "document", "documents", "image", "images", "input",
)  # fmt: skip
"""Columns without which a question may make no sense."""
KNOWN = {"question": QUESTIONS, "answer": ANSWERS}
WORKED = ("extra_info.answer", "solution")
"""Answers that may say in words what another column says alone."""
OPTIONAL = ("grader", "difficulty", "instruction", "tests")
"""Columns that are read under our names alone."""
ROLES = {
    **{role: role for role in ("system", "user", "assistant", "tool")},
    **{"human": "user", "gpt": "assistant", "chatgpt": "assistant", "observation": "tool"},
    **{"developer": "system", "model": "assistant"},
}
"""Roles of a turn, as OpenAI, ShareGPT and Gemini write them."""
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
# ``#### 72``, ``The answer is: $72$.``
_FINAL = re.compile(r"(?:####|\banswer(?: is:?|:))\s*\$?([^\n]+?)\$?\.?\s*$", re.IGNORECASE)


@dataclass(frozen=True)
class Layout:
    """Places of our fields in a file's records."""

    file: Path
    places: Mapping[str, Sequence[str]]
    """Columns or paths of ``question``, ``answer``, ``grader`` and others, the preferred ones first."""
    names: Sequence[str]
    """Columns of the file; those within a record with their path."""
    note: str = ""
    """Sentence on where question and answer come from; empty if they have our names."""

    def fields(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """Return a record's values under our names. Raises ValueError for two questions that differ."""
        fields: dict[str, Any] = {}
        for ours, places in self.places.items():
            # [places that have the field] -> value; the first wins
            values = {place: value_at(record, place, _MISSING) for place in places}
            there = {place: value for place, value in values.items() if value is not _MISSING}
            if ours in KNOWN:
                # An empty column asks and answers nothing.
                there = {place: v for place, v in there.items() if v not in (None, "")} or there
            if ours == "question":
                # A chat may be written as text.
                there = {place: _read(v) for place, v in there.items()}
                # White space and turns before do not make two questions; of equal ones the first place stays.
                asked = {_asked(value): place for place, value in reversed(there.items())}
                if len(asked) > 1:
                    both = " and ".join(reversed(asked.values()))
                    raise ValueError(f"{both} differ")
            if there:
                fields[ours] = next(iter(there.values()))
        return fields

    def missing(self, ours: str) -> str:
        """Return what is missing where a record has no ``question`` or ``answer``."""
        if known := [place for place in self.places.get(ours, (ours,)) if place in self.names]:
            return f"expected {' or '.join(known)}, which other rows have, found none in this one"
        first, *others = KNOWN.get(ours, (ours,))
        expected = repr(first) + f" or one of {', '.join(others)}" * bool(others)
        return f"expected {expected}, found {[*self.names]}"


def find_layout(file: Path, records: Iterable[Any], columns: Mapping[str, str], grader: str | None) -> Layout:
    """Return the layout of a file, from its first ``records``. ``columns``: the recipe's, which come first;
    ``grader``: the recipe's. Raises ValueError for an entry of ``columns`` that cannot act."""
    sample = [record for record in islice(records, SAMPLED) if isinstance(record, dict)]
    names = [*dict.fromkeys(name for record in sample for name in _names(record))]
    # Optional columns have our names, the others known ones; the recipe's ``columns`` overrule both.
    places = {name: (name,) for name in OPTIONAL if name not in columns.values()}
    places |= {ours: _spelt(known, sample) for ours, known in KNOWN.items()}
    if grader == DEMONSTRATION:  # a chat with the response, which what stands beside it lacks (OpenR1-Math)
        places["question"] = tuple(sorted(places["question"], key=lambda place: not _replies(place, sample)))
    places |= {ours: (place,) for ours, place in columns.items()}
    layout = Layout(file, places, names, _note(places, sample, grader))
    if sample:
        _check_columns(layout, columns, sample, grader)
    return layout


def value_at(record: Any, place: str, default: Any = None) -> Any:
    """Return the value at a column or path, ``default`` where there is none."""
    # A column may have dots in its name; only else they reach into records.
    for key in (place,) if isinstance(record, dict) and place in record else place.split("."):
        record = record.get(key, default) if isinstance(record, dict) else default
    return record


# ``['a' 'b']``: NumPy writes no commas.
_UNPARTED = re.compile(r"""(["'])\s+\1""")
# ``array(['a', 'b'], dtype=object)``, ``frozenset({'a'})``
_CALL = re.compile(r"(?:(?:frozen)?set|array)\((.*?)(?:,\s*dtype=\w+)?\)", re.DOTALL)
# ``Fraction(1, 2)``, ``Decimal('0.5')``, ``np.float64(2.0)``
_NUMBER = re.compile(r"""\b(?:Fraction|Rational|Decimal|np\.\w+)\(["']?([^"'()\[\],]+)["']?(?:, *(\d+))?\)""")
"""A number, or its fraction, as Python writes it."""
# ``(1+2j)``
_COMPLEX = re.compile(r"\(?(?:-?[\d.]+[+-]|-)?[\d.]+j\)?")
_BACKSLASH = re.compile(r'\\\\|\\(?!")')
"""A backslash, written as JSON or as it is."""
SAID = ("role", "from", "content", "value")


def chat(value: Any) -> list[Turn]:
    """Return the turns of a chat as OpenAI or ShareGPT writes it, with its other keys. Raises ValueError."""
    turns: list[Turn] = []
    for turn in value if isinstance(value, list) else [value]:
        record = turn if isinstance(turn, dict) else {}
        # OpenAI's keys, or ShareGPT's.
        role = ROLES.get(str(record.get("role", record.get("from"))).lower())
        content = record.get("content", record.get("value"))
        if isinstance(content, list):
            # OpenAI's list of parts, texts alone
            texts = [_text_of(part) for part in content]
            content = "".join(filter(None, texts)) if None not in texts else None
        # Parquet gives each turn all keys, with null where it has none.
        more = {key: _pruned(v) for key, v in record.items() if key not in SAID and v not in (None, "", [])}
        if content is None and more.get("tool_calls"):
            content = ""
        if role is None or not isinstance(content, str):
            expected = "role and content, or from and value,"
            roles = f"a role of {', '.join(ROLES)} and text, no images"
            raise ValueError(f"expected {expected} with {roles}, found {turn!r:.200}")
        turns.append({"role": role, "content": content, **more})
    return turns


def _pruned(value: Any) -> Any:
    # in parquet each record of a list has the fields of all, as null: arguments of other calls, too
    if isinstance(value, dict):
        return {key: _pruned(v) for key, v in value.items() if v is not None}
    return [*map(_pruned, value)] if isinstance(value, list) else value


def _text_of(part: Any) -> str | None:
    # an image's part may have a text of null
    is_text = isinstance(part, dict) and str(part.get("type") or "text").endswith("text")
    return part["text"] if is_text and isinstance(part.get("text"), str) else None


def unwrapped(question: str) -> str | None:
    """Return the question without its data set's instruction (``WRAPPINGS``); None if it has none."""
    matches = (wrapping.fullmatch(question) for wrapping in WRAPPINGS)
    return next((match[1] for match in matches if match), None)


def final_answer(gold: str) -> str:
    r"""Return the answer at the end of a worked solution: in the last ``\boxed{}``, or after ``####`` (GSM8K)
    or ``The answer is:`` (MetaMathQA); the texts of a list, a tuple or a set, written as JSON or by Python,
    with commas between; the values of Python's fractions and decimals. Other golds as they are."""
    # ``Fraction(1, 2)`` becomes ``1/2``.
    gold, numbers = _NUMBER.subn(lambda match: "/".join(filter(None, match.groups())), gold)
    gold = gold.replace("j", "i") if _COMPLEX.fullmatch(gold) else gold
    # ``[1/2, 3/4]``, Python's list of numbers: its items are the answer.
    if numbers and re.fullmatch(r"\[[^\[\]()]*\]", gold):
        return gold[1:-1]
    # Beginnings such as ``['a'``, ``("a"``, ``{'a'``; or a set or an array of NumPy.
    if re.match(r"""(?:\w+\()?[\[({\s]*["']""", gold) or _CALL.fullmatch(gold.strip()):
        gold = ", ".join(_list_of_texts(gold) or [gold])
    if boxed := extract_answer(gold):
        return boxed
    return match[1] if (match := _FINAL.search(gold)) else gold


def _list_of_texts(text: str) -> list[str]:
    """Return the texts of a list, tuple or set, or the text, that was written as JSON, by Python or by NumPy
    (no commas), whose backslashes may be LaTeX's; none for other text."""
    text = call[1] if (call := _CALL.fullmatch(text.strip())) else text.strip()
    if text.startswith("{"):  # in the order that stands there
        text = f"[{text[1:-1]}]"
    with suppress(ValueError, SyntaxError, RecursionError):
        found = ast.literal_eval(_UNPARTED.sub(r"\1, \1", _BACKSLASH.sub(r"\\\\", text)))
        # ``[['a', 'b']]`` is a list in a list of one.
        while isinstance(found, list | tuple) and len(found) == 1:
            (found,) = found
        found = [found] if isinstance(found, str) else [*found]
        plain = all(isinstance(each, str | int | float) for each in found)
        return [str(each) for each in found] if plain else []
    return []


def _names(record: Mapping[str, Any]) -> Iterable[str]:
    for name, value in record.items():
        yield from [f"{name}.{below}" for below in value] if isinstance(value, dict) and value else [name]


def _spelt(known: Sequence[str], sample: Sequence[dict[str, Any]]) -> tuple[str, ...]:
    """Return the ``known`` places as ``sample`` spells them, in capitals, with spaces around or not, the
    exact spelling first; those with a value in one of its records come before the others."""
    found = {name for record in sample for name in (*record, *_names(record))}
    spelt: dict[str, list[str]] = {}
    # The exact spelling sorts first, then by name.
    for name in sorted(found, key=lambda name: (name not in known, name)):
        # A byte order mark may stand before the first name of a file.
        spelt.setdefault(name.strip("\ufeff ").lower(), []).append(name)
    places = [place for name in known for place in spelt.get(name, [name])]
    return tuple(sorted(places, key=lambda place: not _has(sample, place)))


def _read(value: Any) -> Any:
    """Return the value, or the chat that was written as text, as JSON or by Python's ``str``."""
    # ``[{"role": "user", ...}]`` as JSON has it, ``[{'role': 'user', ...}]`` as Python prints it.
    if isinstance(value, str) and re.match(r"\s*\[\s*\{", value):
        for read in (parse_json, ast.literal_eval):
            with suppress(ValueError, SyntaxError, RecursionError):
                return read(value.strip())
    return value


def _asked(value: Any) -> str:
    """Return the last question of a text or chat, in which white space does not count."""
    if isinstance(value, list | dict):
        with suppress(ValueError):
            value = next((turn["content"] for turn in reversed(chat(value)) if turn["role"] == "user"), value)
    return " ".join(str(value).split())


def _has(sample: Sequence[dict[str, Any]], place: str) -> bool:
    return any(value_at(record, place) not in (None, "") for record in sample)


def _is_chat(place: str, sample: Sequence[dict[str, Any]]) -> bool:
    return any(isinstance(_read(value_at(record, place)), list) for record in sample)


def _replies(place: str, sample: Sequence[dict[str, Any]]) -> bool:
    for record in sample:
        with suppress(ValueError, IndexError):
            if chat(_read(value_at(record, place)))[-1]["role"] == "assistant":
                return True
    return False


def _check_columns(
    layout: Layout, columns: Mapping[str, str], sample: Sequence[dict], grader: str | None
) -> None:
    names, asked = layout.names, _used(layout.places["question"], sample)
    for ours, place in columns.items():
        if not _has(sample, place):
            near = get_close_matches(place, names, 1)
            hint = f" (nearest: {near[0]!r})" if near else ""
            found = f"{place!r} is in none of its first {len(sample)} rows{hint}"
            raise ValueError(f"{layout.file}: columns: {ours}: {found}: expected one of {[*names]}")
    graders = {grader or value_at(record, columns.get("grader", "grader")) or "math" for record in sample}
    replied = all(any(_replies(place, [record]) for place in asked) for record in sample)
    # columns that nothing would read
    useless = {
        "instruction": "a chat takes no instruction" * any(_is_chat(place, sample) for place in asked),
        "grader": grader is not None and f"the recipe's grader is {grader}",
        "tests": "code" not in graders and "no row's grader is code",
        "answer": (graders == {"code"} and "tests grade code")
        or (graders == {DEMONSTRATION} and replied and "the chat ends with the response"),
    }
    for ours, why in useless.items():
        if why and ours in columns:
            raise ValueError(f"{layout.file}: columns: {ours}: {columns[ours]} has no effect: {why}")


def _note(places: Mapping[str, Sequence[str]], sample: Sequence[dict], grader: str | None) -> str:
    question, answer = (_used(places[ours], sample) for ours in KNOWN)
    if grader == DEMONSTRATION and all(_replies(place, sample) for place in question):
        answer = []
    kind = " (a chat, as it stands)" if any(_is_chat(place, sample) for place in question) else ""
    names = dict.fromkeys(name for record in sample for name in record)
    hidden = (*BESIDE, "instruction") if kind else BESIDE
    beside = [n for n in names if n.lower() in hidden and _has(sample, n) and n not in question]
    others = [place for place in places["answer"] if place not in (*answer, *WORKED) and _has(sample, place)]
    unread = f"; not shown to the model: {', '.join(beside)}" if beside else ""
    unread += f"; not read: {', '.join(others)}" if others else ""
    ours = (question, kind) == (["question"], "") and {*answer} <= {*ANSWERS[:2]}
    if not question or (ours and not unread):
        return ""
    read = f"question from {' or '.join(question)}{kind}"
    return read + f", answer from {' or '.join(answer)}" * bool(answer) + unread


def _used(places: Sequence[str], sample: Sequence[dict[str, Any]]) -> list[str]:
    """Return the places that are the first with a value in a record of ``sample``."""
    first = (next((p for p in places if value_at(record, p) not in (None, "")), "") for record in sample)
    return [place for place in dict.fromkeys(first) if place]
