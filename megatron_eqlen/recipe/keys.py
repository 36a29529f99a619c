"""All keys of a recipe, and the nearest key to a misspelt one."""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any

from megatron_eqlen.recipe import Recipe, Section
from megatron_eqlen.recipe.others import HINTS, TRAINERS, read_table, table

SAME_SECTION = 0.1
"""Factor by which a key of the same section is preferred to an equally similar one elsewhere."""
LEAST_SIMILAR = 0.65
"""Lowest similarity, from 0 to 1, at which a key is suggested."""
ABBREVIATION = 0.9
"""Similarity of a key to its first letters, three or more: ``temp`` means ``temperature``, not ``steps``."""


def nearest(unknown: Sequence[str | int], schema: type[Section] = Recipe) -> str | None:
    """Return a hint for an unknown key: the nearest dotted key of ``schema``, or what ``others.yaml`` says.

    ``("lr",)`` -> ``nearest: 'optimizer.lr'``; ``("data", "sources", 3, "wieght")`` and ``("data",
    "sources[3]", "weight")`` -> ``nearest: 'data.sources.3.weight'``.
    """
    unknown = ".".join(map(str, unknown)).replace("[", ".").replace("]", "").split(".")
    section, name = _without_numbers(unknown[:-1]), unknown[-1]
    same = (key for key in all_keys(schema) if _without_numbers(key) == _without_numbers(unknown))
    if exact := next(same, None):  # a list's number was left out, or written in brackets
        return f"nearest: {'.'.join(unknown if len(unknown) == len(exact) else exact)!r}"
    if schema is Recipe and (known := _hint(unknown)):
        return known

    def likeness(key: tuple[str, ...]) -> float:
        return _alike(name.lower(), key[-1]) + SAME_SECTION * (_without_numbers(key[:-1]) == section)

    # Of equally similar keys the one with fewer parts.
    best = max(all_keys(schema), key=lambda key: (likeness(key), -len(key)))
    words = [[_alike(word, own) for own in best[-1].split("_")] for word in name.lower().split("_")]
    others = any(max(alike) <= LEAST_SIMILAR for alike in words)  # ``batch`` is no ``block``
    if likeness(best) < LEAST_SIMILAR or (others and likeness(best) <= ABBREVIATION):
        return _hint(unknown, lost=True) if schema is Recipe else None
    # In the same section the numbers that were written stay: ``data.sources.3.weight``.
    if _without_numbers(best[:-1]) == section:
        best = (*unknown[:-1], best[-1])
    return f"nearest: {'.'.join(best)!r}"


def _hint(parts: Sequence[str], lost: bool = False) -> str | None:
    """Return where a former key went, or the nearest key to another trainer's, or why there is none."""
    key = ".".join(parts).lower().replace("-", "_")
    if went := read_table()["went"].get(".".join(_without_numbers(parts)).lower()):
        return f"it went to {went['to']}"
    last = key.rpartition(".")[2]
    rows = [(row.theirs.lower(), row) for trainer in (HINTS, *TRAINERS) for row in table()[trainer]]
    # The whole name first, then the last part, then patterns; the first row decides.
    alike = [row for theirs, row in rows if theirs == key]
    ours = ((theirs, row) for theirs, row in rows if lost or (row.ours and not row.why))
    alike += [row for theirs, row in ours if theirs.rpartition(".")[2] == last]
    alike += [row for theirs, row in rows if fnmatchcase(key, theirs)]
    for row in alike:
        nearest = row.ours and not row.why
        return f"nearest: {row.ours!r}" if nearest else f"another trainer's: {row.irrelevant or row.why}"
    return None


def _alike(name: str, key: str) -> float:
    """Return the similarity of two names, from 0 to 1 (equal)."""
    ratio = difflib.SequenceMatcher(None, name, key).ratio()
    return max(ratio, ABBREVIATION) if len(name) >= 3 and key.startswith(name) and name != key else ratio


def all_keys(section: type[Section] = Recipe, at: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield every key of the schema and of its sections; list items have the number 0."""
    for name, field in section.model_fields.items():
        yield (*at, name)
        below, is_list = section_in(field.annotation)
        if below is not None:
            yield from all_keys(below, (*at, name, *(["0"] if is_list else [])))


def section_in(annotation: Any) -> tuple[type[Section] | None, bool]:
    """Return the section in a key of this type, and True if the key holds a list of sections."""
    origin = typing.get_origin(annotation)
    if origin in (list, types.UnionType, typing.Union):
        sections = [section_in(argument)[0] for argument in typing.get_args(annotation)]
        return next((section for section in sections if section is not None), None), origin is list
    is_section = isinstance(annotation, type) and issubclass(annotation, Section)
    return (annotation if is_section else None), False


def _without_numbers(parts: Sequence[str | int]) -> tuple[str, ...]:
    return tuple(str(part) for part in parts if not str(part).isdigit())
