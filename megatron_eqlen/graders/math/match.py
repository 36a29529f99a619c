"""Compares two answers by their texts: in normal form, without units and in the same form."""

from __future__ import annotations

import re
from math import gcd

from megatron_eqlen.graders.math.answer import is_numeric, normalize

_ATOM = re.compile(r"-?\d+|[A-Z]{2,}")
_UNIT = re.compile(r"(.+)\\unit\{(.*)\}")
# ``5m``
_LETTER_UNIT = re.compile(r"(-?\d+(?:\.\d+)?)[msghlLNJWVK]")
# ``A) 5``, ``(A) five``, but no text that names another choice.
_CHOICE = re.compile(r"\(?([A-Z])[).:]\)?(?!.*(?<![A-Za-z\\])[A-Z](?![A-Za-z]))")
# ``\text{yes},\text{because...}``
_CLAUSE = re.compile(r"\\text\{(yes|no|true|false)\}[,:.](.*)")
_OPPOSITE = {"yes": "no|not|never|false", "true": "no|not|never|false", "no": "yes|true", "false": "yes|true"}
_DECIMAL, _COMMA = re.compile(r"-?\d+\.\d+"), re.compile(r"-?\d+,\d+")
_AFFIRMATIONS = (r"\text{yes}", r"\text{true}"), (r"\text{no}", r"\text{false}")
_RATIO = re.compile(r"\d+(?::\d+)+")
# ``12:30``, ``2026-11-29``, ``11/29/2026``, ``4R3``: no arithmetic
_TIME = re.compile(r"\d{1,2}:\d\d(?::\d\d)?|\d{4}-\d\d?-\d\d?|\d\d?/\d\d?/\d{4}|\d+[Rr]\d+")
# ``A,B``, ``AB``
_CHOICES = re.compile(r"[A-H](?:,?[A-H])+")
_BOUND = re.compile(r"([kmn])\s*(?:\\in(?![a-z])|∈)\s*(?:ℤ|\\(?:mathbb|mathbf|Bbb)\s*\{?Z)")
"""An integer that may be any, whatever its name."""
_ALONE = r"(?<![\\A-Za-z]){}(?![A-Za-z])"
# ``(B)12``: a choice with its value.
_CHOSEN = re.compile(r"\(?([A-E])\)(.+)")


def compare_texts(gold: str, answer: str, parse: bool = False) -> str | tuple[str, str]:
    """Return the verdict on two answers as they were written, or their normal forms if only mathematics can
    tell. ``parse``: do so for equal texts, too. Time grows with the square of the lengths."""
    if not normalize(answer):
        return "no_answer"
    names = [match[1] for text in (gold, answer) if (match := _BOUND.search(text))]
    # ``2k\pi, k \in \mathbb{Z}`` and ``2n\pi, n \in \mathbb{Z}`` are the same.
    if len({*names}) == 2 and not re.search(_ALONE.format(names[0]), answer):
        answer = re.sub(_ALONE.format(names[1]), names[0], answer)
    pair = match_units(normalize(gold), normalize(answer))
    if pair is None:
        return "wrong"
    if parse:
        return pair
    if pair[0] == pair[1]:
        return "correct"
    # Integers need no parser, and ``IV``, ``CAT``, ``TH`` are no products.
    return "wrong" if _ATOM.fullmatch(pair[0]) and _ATOM.fullmatch(pair[1]) else pair


def match_units(gold: str, answer: str) -> tuple[str, str] | None:
    r"""Return two normal forms without their units; None if the units differ.

    A unit that only one side names is taken for the other's, too: the question may have asked for it. ``5 m``
    without ``\text`` is a product, of the question's m, unless the other side has a unit or is a gold number.
    """
    gold_value, gold_unit = _parts(gold)
    value, unit = _parts(answer)
    if gold_unit and unit:
        return (gold_value, value) if gold_unit == unit else None
    # A percentage is no length.
    if (gold_unit and value.endswith("%")) or (unit and gold_value.endswith("%")):
        return None
    if unit and gold.lower().endswith(unit):
        return gold[: -len(unit)], value
    if gold_unit and answer.lower().endswith(gold_unit):
        return gold_value, answer[: -len(gold_unit)]
    if not unit and is_numeric(gold_value) and (letter := _LETTER_UNIT.fullmatch(answer)):
        return None if gold_unit else (gold_value, letter[1])
    return _as_asked(*_decimal_commas(gold_value, value))


def _decimal_commas(gold: str, answer: str) -> tuple[str, str]:
    """Resolve a comma: ``1,22`` beside ``1.22`` is a decimal, else a list."""
    if _DECIMAL.fullmatch(gold) and _COMMA.fullmatch(answer):
        return gold, answer.replace(",", ".")
    if _DECIMAL.fullmatch(answer) and _COMMA.fullmatch(gold) and len(gold.partition(",")[2]) > 1:
        return gold.replace(",", "."), answer
    return gold, answer


def _as_asked(gold: str, answer: str) -> tuple[str, str] | None:
    """Return both texts, ``answer`` in the gold's form where that has one; None for times that differ."""
    if len(gold) == 1 and gold.isupper() and (choice := _CHOICE.match(answer)):
        return gold, choice[1]
    if _CHOICES.fullmatch(answer) and _CHOICES.fullmatch(gold):
        return "".join(sorted(gold.replace(",", ""))), "".join(sorted(answer.replace(",", "")))
    # A gold ``(B)12`` is met by ``B`` and by ``12``.
    if (chosen := _CHOSEN.fullmatch(gold)) and not _CHOSEN.match(answer):
        gold = chosen[1 if len(answer) == 1 and answer.isupper() else 2]
    if (clause := _CLAUSE.match(answer)) and not re.search(_OPPOSITE[clause[1]], clause[2], re.IGNORECASE):
        answer = rf"\text{{{clause[1]}}}"
    if any(gold in words and answer in words for words in _AFFIRMATIONS):
        return gold, gold
    if ":" in gold and _RATIO.fullmatch(answer):
        gold = gold.rpartition("=")[2]
    if ":" in answer and _RATIO.fullmatch(gold):
        answer = answer.rpartition("=")[2]
    if _TIME.fullmatch(gold):
        return (gold, gold) if answer.upper() == gold.upper() else None
    if _RATIO.fullmatch(answer):  # no number: math-verify would divide
        return (_reduced(gold), _reduced(answer)) if _RATIO.fullmatch(gold) else (gold, "")
    return gold, answer


def _parts(text: str) -> tuple[str, str]:
    match = _UNIT.fullmatch(text)
    return (match[1], match[2]) if match else (text, "")


def _reduced(ratio: str) -> str:
    terms = [int(term) for term in ratio.split(":")]
    return ":".join(str(term // (gcd(*terms) or 1)) for term in terms)
