"""Keys of other trainers and ours: the table ``others.yaml``, and the hint for an unknown key from it."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

from megatron_eqlen.recipe.yaml_values import read_value

TRAINERS = ("verl", "trl", "slime")
HINTS = "hints"
"""Part of the table with names that only hints know."""


@dataclass(frozen=True)
class Row:
    """A key of another trainer; ``others.yaml`` says what the fields mean."""

    theirs: str
    ours: str | None = None
    computed: str | None = None
    default: str | None = None
    values: Mapping[str, Any] | None = None
    differs: str = ""
    always: str = ""
    lost: str = ""


@cache
def _file() -> dict[str, Any]:
    return read_value(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))


@cache
def table() -> dict[str, list[Row]]:
    """Return the rows of each trainer, in the table's order."""
    return {
        trainer: [
            Row(theirs, **{"computed" if field == "as" else field: value for field, value in row.items()})
            for theirs, row in _file()[trainer].items()
        ]
        for trainer in (*TRAINERS, HINTS)
    }


def hint(parts: Sequence[str], lost: bool = False) -> str | None:
    """Return what to say of another trainer's key, in any case: the nearest key of ours, also by its last
    part, or why there is none (``lost``: by its last part, too). A key that recipes had is told by its new
    place."""
    key = ".".join(parts).lower().replace("-", "_")
    if went := _file()["went"].get(key):
        return f"it went to {went['to']}"
    last = key.rpartition(".")[2]
    rows = [row for trainer in (HINTS, *TRAINERS) for row in table()[trainer]]
    same = [row for row in rows if row.theirs.lower() == key]
    same += [row for row in rows if (row.ours or lost) and row.theirs.lower().rpartition(".")[2] == last]
    same += [row for row in rows if fnmatchcase(key, row.theirs.lower())]
    for row in same:
        return f"nearest: {row.ours!r}" if row.ours else f"another trainer's: {row.always or row.lost}"
    return None


def carried(raw: dict[str, Any]) -> dict[str, Any]:
    """Return a recipe that an earlier version stored with its keys where they are now. Those that had their
    default go; those without a new place stay, to be refused by name."""
    found = copy.deepcopy(raw)
    for key, went in _file()["went"].items():
        section, _, name = key.rpartition(".")
        at = found.get(section)
        if isinstance(at, dict) and name in at and (value := at.pop(name)) != went["was"]:
            new = re.fullmatch(r"(\w+)\.(\w+)\.(\w+)", went["to"])
            if new is None:
                at[name] = value
            else:
                found.setdefault(new[1], {}).setdefault(new[2], {})[new[3]] = value
    return found
