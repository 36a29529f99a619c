"""All keys that a recipe may have, and the nearest of them to a misspelt one."""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Iterator, Sequence
from typing import Any

from megatron_eqlen.recipe import Recipe, Section

SAME_SECTION = 0.1
"""Factor by which a key of the same section is preferred to an equally similar one elsewhere."""
LEAST_SIMILAR = 0.4
"""Lowest similarity, from 0 to 1, at which a key is suggested."""
ABBREVIATION = 0.9
"""Similarity of a key to its first letters, three or more: ``temp`` means ``temperature``, not ``steps``."""


RENAMED = {"rollout.sync_tolerance": "rollout.mismatch.tolerance"}
"""Keys of earlier versions and what they are called now."""


def nearest(unknown: Sequence[str | int], schema: type[Section] = Recipe) -> str | None:
    """The dotted key of the whole ``schema`` whose name is most like the last part of ``unknown``.

    ``("lr",)`` -> ``optimizer.lr``; ``("data", "sources", 3, "wieght")`` -> ``data.sources.3.weight``.
    """
    section, name = _without_numbers(unknown[:-1]), str(unknown[-1])

    def likeness(key: tuple[str, ...]) -> float:
        return _alike(name.lower(), key[-1]) + SAME_SECTION * (_without_numbers(key[:-1]) == section)

    best = max(all_keys(schema), key=lambda key: (likeness(key), -len(key)))
    if likeness(best) < LEAST_SIMILAR:
        return None
    if _without_numbers(best[:-1]) == section:
        best = (*map(str, unknown[:-1]), best[-1])
    return ".".join(best)


def _alike(name: str, key: str) -> float:
    """From 0 to 1, for the same name."""
    ratio = difflib.SequenceMatcher(None, name, key).ratio()
    return max(ratio, ABBREVIATION) if len(name) >= 3 and key.startswith(name) and name != key else ratio


def all_keys(section: type[Section] = Recipe, at: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Every key of the schema and of its sections; an item of a list has the number 0."""
    for name, field in section.model_fields.items():
        yield (*at, name)
        below, is_list = _section(field.annotation)
        if below is not None:
            yield from all_keys(below, (*at, name, *(["0"] if is_list else [])))


def _section(annotation: Any) -> tuple[type[Section] | None, bool]:
    """The section that a key of this type holds, and whether it holds a list of them."""
    origin = typing.get_origin(annotation)
    if origin in (list, types.UnionType, typing.Union):
        found = [_section(argument)[0] for argument in typing.get_args(annotation)]
        return next((one for one in found if one is not None), None), origin is list
    is_section = isinstance(annotation, type) and issubclass(annotation, Section)
    return (annotation if is_section else None), False


def _without_numbers(parts: Sequence[str | int]) -> tuple[str, ...]:
    return tuple(str(part) for part in parts if not str(part).isdigit())
