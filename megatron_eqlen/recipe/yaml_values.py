"""YAML of recipes: every scalar but ``null`` stays text, and the schema reads it as the type of its key.
``time: 24:00:00`` and ``account: 0123`` keep their spelling, and ``lr: 1e-6`` is a number, unlike in PyYAML.
Where a key's type is open (``Value``), the spelling decides, and text in quotes is text."""

from __future__ import annotations

import math
from typing import Annotated, Any

import yaml
from pydantic import BeforeValidator, StrictBool, StrictFloat, StrictInt, StrictStr

from megatron_eqlen.files import DEEPEST

KEPT = ("tag:yaml.org,2002:null", "tag:yaml.org,2002:merge")
"""Tags that plain scalars get by their spelling; ``merge`` is the key ``<<``."""


MOST_VALUES = 1_000_000


class Plain(str):
    """Text without quotes; ``value``: the boolean or finite number that it spells, or else the text."""

    @property
    def value(self) -> bool | float | str:
        if self.lower() in yaml.SafeLoader.bool_values:
            return yaml.SafeLoader.bool_values[self.lower()]
        for number in (int, float):
            try:
                return number(self) if math.isfinite(float(self)) else str(self)
            except ValueError:
                pass
        return str(self)


Value = Annotated[
    StrictBool | StrictInt | StrictFloat | StrictStr | None,
    BeforeValidator(lambda value: value.value if isinstance(value, Plain) else value),
]
"""Value of a key that is not ours."""
type Tree = Value | list[Tree] | dict[str, Tree]
Options = dict[str, Tree]


class _Loader(yaml.CSafeLoader):
    """YAML loader that reads plain scalars as text or null, and refuses duplicate keys."""


# PyYAML's rules for numbers, booleans and dates read ``1e-6`` as text and ``24:00:00`` as 86400: left out
_Loader.yaml_implicit_resolvers = {
    first: [(tag, form) for tag, form in resolvers if tag in KEPT]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


class _Dumper(yaml.CSafeDumper):
    """YAML dumper that quotes text which, without, would be ``Plain``."""


def _read(loader: _Loader, node: yaml.ScalarNode) -> str:
    return (str if node.style else Plain)(loader.construct_scalar(node))


def _plain(to: _Dumper, text: Plain) -> yaml.Node:
    return to.represent_scalar(to.resolve(yaml.ScalarNode, str(text), (True, False)), str(text))


def _text(to: _Dumper, text: str) -> yaml.Node:
    # Text that spells a number or a boolean gets quotes.
    is_text = isinstance(Plain(text).value, str)
    return to.represent_scalar("tag:yaml.org,2002:str", text, style=None if is_text else "'")


_Loader.add_constructor("tag:yaml.org,2002:str", _read)
_Dumper.add_representer(Plain, _plain)
_Dumper.add_representer(str, _text)


def read_value(text: str) -> Any:
    """Return the value of the YAML ``text``: text, None, lists and mappings. Raises yaml.YAMLError, also for
    duplicate keys and for nesting beyond ``DEEPEST``, at which libyaml would crash some time."""
    depth = 0
    # Events come one by one: nesting is bounded before libyaml builds nodes by recursion.
    for event in yaml.parse(text, _Loader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > DEEPEST:
            raise yaml.MarkedYAMLError(problem="nested too deeply", problem_mark=event.start_mark)
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        _refuse_duplicates(node, "", {})
        return loader.construct_document(node)
    finally:
        loader.dispose()


def to_yaml(value: Any, **style: Any) -> str:
    """Return YAML that ``read_value`` reads back, with numbers and booleans as their text."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, **style)


def in_one_line(error: Exception) -> str:
    """Return the error as ``line 7: ...``, if its line is known."""
    if not isinstance(error, yaml.MarkedYAMLError):
        return " ".join(str(error).split())
    mark = error.problem_mark or error.context_mark
    where = f"line {mark.line + 1}: " if mark else ""
    return where + ", ".join(part for part in (error.problem, error.context) if part)


def _refuse_duplicates(node: yaml.Node, at: str, sizes: dict[int, int]) -> int:
    """Return the number of values in ``node``. Raise yaml.MarkedYAMLError for a duplicate key, a value that
    contains itself, and for aliases that repeat each other without end. ``at``: dotted key of ``node``, with
    a final dot; ``sizes``: of visited nodes by id, 0 for those around ``node``."""
    # ``&a [*a]``: the node is found again while its own values are counted.
    if (size := sizes.get(id(node))) == 0:
        raise yaml.MarkedYAMLError(problem=f"{at[:-1]!r} contains itself", problem_mark=node.start_mark)
    # An alias: its values count at each place, but are walked once.
    if size is not None:
        return size
    sizes[id(node)], size = 0, 1
    if isinstance(node, yaml.SequenceNode):
        size += sum(_refuse_duplicates(item, f"{at}{n}.", sizes) for n, item in enumerate(node.value))
    elif isinstance(node, yaml.MappingNode):
        lines: dict[str, int] = {}
        for key, value in node.value:
            name = str(key.value)
            if name in lines:
                raise yaml.MarkedYAMLError(
                    problem=f"key {at + name!r} is given twice (first in line {lines[name]})",
                    problem_mark=key.start_mark,
                )
            lines[name] = key.start_mark.line + 1
            size += _refuse_duplicates(value, f"{at}{name}.", sizes)
    # Ten aliases of ten aliases, ten levels deep, would be 10 billion values.
    if size > MOST_VALUES:
        raise yaml.MarkedYAMLError(
            problem=f"more than {MOST_VALUES:,} values, aliases written out", problem_mark=node.start_mark
        )
    sizes[id(node)] = size
    return size
