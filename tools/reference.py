#!/usr/bin/env python
"""Print a reference as Markdown, made from the code that defines it: recipe keys, metrics, other trainers'
keys, or the package's files, as ``tools/reference.py keys``. ``tools/reference.py write`` puts those of
``PAGES`` into their pages."""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

from megatron_eqlen.metrics import DECLARED, Metric, counts
from megatron_eqlen.recipe import Recipe
from megatron_eqlen.recipe.others import TRAINERS, Row, defaults, table

PACKAGE = Path(__file__).parents[1] / "megatron_eqlen"
Schema = dict[str, Any]
"""JSON schema of a recipe, one of its sections, or a key."""

BOUNDS = {"exclusiveMinimum": ">", "minimum": "≥", "exclusiveMaximum": "<", "maximum": "≤"}
TYPES = {"boolean": "true or false", "integer": "integer", "number": "number", "string": "text"}
METRIC = ("metric", "unit", "of several values", "meaning")
MERGED = {"sum": "sum", "max": "largest", "min": "smallest", "last": "newest"}


def keys() -> str:
    """Return each section of a recipe with its keys: type, default, meaning."""
    root = Recipe.model_json_schema()
    return "\n\n".join(_section(name, section, root) for name, section in _sections("", root, root))


def _sections(name: str, section: Schema, root: Schema) -> Iterator[tuple[str, Schema]]:
    """Yield ``section`` and those below it, by their dotted names; ``[]`` stands for the items of a list."""
    yield name, section
    for key, schema in section["properties"].items():
        below = _below(schema, root)
        if below is not None:
            dotted = f"{name}.{key}".lstrip(".") + "[]" * ("items" in schema)
            yield from _sections(dotted, below, root)


def _below(schema: Schema, root: Schema) -> Schema | None:
    """Return the section that a key holds, or a list of."""
    reference = schema.get("$ref") or schema.get("items", {}).get("$ref")
    return root["$defs"][reference.rpartition("/")[2]] if reference else None


def _section(name: str, section: Schema, root: Schema) -> str:
    rows = [
        (f"`{name}.{key}`" if name else f"`{key}`", _type(schema), _default(schema), _text(schema))
        for key, schema in section["properties"].items()
        if _below(schema, root) is None
    ]
    head = f"## {name}\n\n{_text(section)}" if name else "## The whole run"
    return f"{head}\n\n" + _table(("key", "type", "default", "meaning"), rows)


def _type(schema: Schema) -> str:
    """Return the type in words: ``integer > 0``, ``list of text``, ``"a" or "b"``."""
    if "anyOf" in schema:
        return " or ".join(
            dict.fromkeys(_type(option) for option in schema["anyOf"] if option != {"type": "null"})
        )
    if "enum" in schema or "const" in schema:
        return " or ".join(f"`{choice}`" for choice in schema.get("enum") or [schema["const"]])
    if "prefixItems" in schema:
        return f"[{', '.join(_type(item) for item in schema['prefixItems'])}]"
    if schema.get("type") == "array":
        return f"list of {_type(schema['items'])}"
    if schema.get("type") == "object":
        return "mapping"
    limits = [f"{sign} {schema[bound]:.10g}" for bound, sign in BOUNDS.items() if bound in schema]
    if "multipleOf" in schema:
        limits.append(f"multiple of {schema['multipleOf']}")
    return " ".join([TYPES[schema["type"]], ", ".join(limits)]).strip()


def _default(schema: Schema) -> str:
    if "default" not in schema:
        return "**needed**"
    value = schema["default"]
    return f"`{value if isinstance(value, str) else json.dumps(value)}`"


def _text(schema: Schema) -> str:
    conditions = " and ".join(f"``{when}``".replace(" set``", "`` set") for when in schema.get("when", ()))
    about = inspect.cleandoc(schema.get("description", ""))
    return _markdown(f"{about} Acts only with {conditions}." if conditions else about)


def _markdown(docstring: str) -> str:
    """Return a docstring as one line of Markdown."""
    return re.sub(r"``(.+?)``", r"`\1`", " ".join(docstring.split()))


def metrics() -> str:
    """Return each metric: unit, merge of several values, meaning."""
    return "\n\n".join(
        f"## {family}\n\n" + _table(METRIC, map(_metric, members))
        for family, members in groupby(DECLARED, key=lambda metric: metric.name.split("/")[0])
    )


def _metric(metric: Metric) -> tuple[str, ...]:
    merged = _merged(metric.merge)
    if metric.in_turn != metric.merge:
        merged += f"; one after the other: {_merged(metric.in_turn)}"
    return f"`{metric.name}`", metric.unit, merged, metric.about


def _merged(way: str) -> str:
    return "mean over " + ", ".join(f"`{count}`" for count in counts(way)) if counts(way) else MERGED[way]


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '&#124;') for cell in line)} |" for line in lines)


def files(folder: Path = PACKAGE) -> str:
    """Return each module below ``folder`` with the first sentence of its docstring."""
    docstrings = {
        str(file.relative_to(folder)): ast.get_docstring(ast.parse(file.read_text(encoding="utf-8")))
        for file in sorted(folder.rglob("*.py"))
    }
    first = {name: re.split(r"\.\s|\n\n|\.$", text)[0] for name, text in docstrings.items() if text}
    return _table(("file", "content"), ((f"`{name}`", _markdown(text)) for name, text in first.items()))


NAMES = {"verl": "verl", "trl": "TRL", "slime": "slime"}


def others() -> str:
    """Return each key of the other trainers: ours, their default, and what to know; then what needs none."""
    head = ("key", "ours", "its default", "remark")
    parts: list[str] = []
    for name in TRAINERS:
        known = defaults(name)
        rows = [row for row in table()[name] if not row.irrelevant]
        parts.append(f"## {NAMES[name]}\n\n" + _table(head, (_other(row, known) for row in rows)))
        without = {row.irrelevant: [] for row in table()[name] if row.irrelevant}
        for row in (row for row in table()[name] if row.irrelevant):
            without[row.irrelevant].append(f"`{row.theirs}`")
        parts += [f"* {reason}: {', '.join(names)}" for reason, names in without.items()]
    return "\n\n".join(parts)


def _other(row: Row, known: Mapping[str, object]) -> tuple[str, ...]:
    values = "".join(
        f"; {theirs}: {new or 'as ours'}" for theirs, new in row.values.items() if theirs not in ("*", new)
    )
    remark = f"lost: {row.why}" if row.why else row.effect
    default = str(known.get(row.theirs, ""))
    return (
        f"`{row.theirs}`",
        f"`{row.ours}`" if row.ours else "-",
        default,
        remark + (values if remark else values[2:]),
    )


REFERENCES: dict[str, Callable[[], str]] = {
    "keys": keys,
    "metrics": metrics,
    "others": others,
    "files": files,
}
DOCS = PACKAGE.parent / "docs"
PAGES = {"keys": DOCS / "recipe_keys.md", "metrics": DOCS / "metrics.md", "others": DOCS / "from_verl.md"}
"""Pages that hold a reference, after the line ``MARK``."""
MARK = "<!-- The rest of this page is made by tools/reference.py write. -->\n"


def page(name: str) -> str:
    """Return the page of a reference as it should be."""
    return PAGES[name].read_text(encoding="utf-8").partition(MARK)[0] + MARK + f"\n{REFERENCES[name]()}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=(*REFERENCES, "write"))
    name = parser.parse_args().name
    if name != "write":
        print(REFERENCES[name]())
        return
    for each, path in PAGES.items():
        path.write_text(page(each), encoding="utf-8")


if __name__ == "__main__":
    main()
