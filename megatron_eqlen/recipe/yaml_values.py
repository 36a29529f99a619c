"""YAML of recipes: numbers of YAML 1.2, unique keys, and text wherever the schema expects text.

``time: 13`` and ``account: 0123`` are text under keys that hold text, although YAML reads numbers there.
"""

from __future__ import annotations

import copy
import re
import types
import typing
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, Literal

import yaml
from pydantic import BaseModel

TAG = "tag:yaml.org,2002:"
_NUMBERS = {
    "int": r"[-+]?(0|[1-9][\d_]*|0x[\da-fA-F]+)",
    "float": r"[-+]?(\.\d+|\d[\d_]*(\.\d*)?)([eE][-+]?\d+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
}


class _Loader(yaml.SafeLoader):
    """YAML loader with the numbers of YAML 1.2. PyYAML's older rules read ``1e-6`` as text and ``1:00:00`` as
    3600."""


class _Dumper(yaml.SafeDumper):
    """YAML dumper that quotes text which ``_Loader`` or PyYAML's own loaders would read as another type."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, form) for tag, form in resolvers if tag.removeprefix(TAG) not in _NUMBERS]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for _kind, _form in _NUMBERS.items():
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(f"{TAG}{_kind}", re.compile(f"^({_form})$"), list("-+0123456789."))


def read_value(text: str, schema: Any = Any) -> Any:
    """Return the value of the YAML ``text`` for a key of type ``schema``. Raises yaml.YAMLError, also for
    duplicate keys."""
    return copy.deepcopy(_parsed(text, schema))


def to_yaml(value: Any) -> str:
    """Return YAML that ``read_value`` reads back to the same value."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def in_one_line(error: yaml.YAMLError) -> str:
    """Return the error as ``line 7: ...``, if its line is known."""
    if not isinstance(error, yaml.MarkedYAMLError):
        return " ".join(str(error).split())
    mark = error.problem_mark or error.context_mark
    where = f"line {mark.line + 1}: " if mark else ""
    return where + ", ".join(part for part in (error.problem, error.context) if part)


@lru_cache(maxsize=64)
def _parsed(text: str, schema: Any) -> Any:
    """Parse YAML, with a cache: parsing dominates the loading of recipes, and a sweep loads the same files
    for each run."""
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        _apply_schema(node, schema, "", set())
        return loader.construct_document(node)
    finally:
        loader.dispose()


def _apply_schema(node: yaml.Node, schema: Any, at: str, seen: set[int]) -> None:
    """Turn the plain scalars of keys that hold text into text. Raises yaml.MarkedYAMLError for a duplicate
    key. ``at``: dotted key of ``node``, with a final dot; ``seen``: ids of visited nodes, since aliases may
    repeat them."""
    if id(node) in seen:
        return
    seen.add(id(node))
    if isinstance(node, yaml.ScalarNode):
        if node.style is None and node.tag != f"{TAG}null" and _holds_text(schema, node.value):
            node.tag = f"{TAG}str"
    elif isinstance(node, yaml.SequenceNode):
        for number, item in enumerate(node.value):
            _apply_schema(item, below(schema, number), f"{at}{number}.", seen)
    elif isinstance(node, yaml.MappingNode):
        lines: dict[str, int] = {}
        for key, value in node.value:
            name = key.value if isinstance(key, yaml.ScalarNode) else str(key.start_mark.line)
            if name in lines:
                raise yaml.MarkedYAMLError(
                    problem=f"key {at + name!r} is given twice (first in line {lines[name]})",
                    problem_mark=key.start_mark,
                )
            lines[name] = key.start_mark.line + 1
            _apply_schema(value, below(schema, name), f"{at}{name}.", seen)


def below(schema: Any, key: str | int) -> Any:
    """Return the type of ``key`` in a section, list or mapping of type ``schema``; Any if unknown."""
    for option in _options(schema):
        if isinstance(option, type) and issubclass(option, BaseModel) and key in option.model_fields:
            return option.model_fields[str(key)].annotation
        if typing.get_origin(option) is list:
            return typing.get_args(option)[0]
    return Any


def _options(schema: Any) -> Iterator[Any]:
    """Yield the member types of a union, without None."""
    origin = typing.get_origin(schema)
    if origin is typing.Annotated:
        yield from _options(typing.get_args(schema)[0])
    elif origin in (types.UnionType, typing.Union):
        for option in typing.get_args(schema):
            yield from _options(option)
    elif schema is not type(None):
        yield schema


def _holds_text(schema: Any, text: str) -> bool:
    """Return True if a key of type ``schema`` accepts ``text`` as it is written."""
    options = [*_options(schema)]
    return all(option is str for option in options) or any(
        typing.get_origin(option) is Literal and text in typing.get_args(option) for option in options
    )
