"""Keys of other trainers and ours: the tables ``others.yaml`` and ``others_defaults.yaml``."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

from megatron_eqlen.recipe.yaml_values import read_value

TRAINERS = ("verl", "trl", "slime")
# Column of the table with names that only hints know.
HINTS = "hints"


@dataclass(frozen=True)
class Row:
    """A key of another trainer; ``others.yaml`` says what the fields mean."""

    theirs: str
    neutral: tuple[str, ...]
    ours: str = ""
    part: str = ""
    values: Mapping[str, Any] = field(default_factory=dict)
    also: Mapping[str, Any] = field(default_factory=dict)
    effect: str = ""
    when: str = ""
    why: str = ""
    irrelevant: str = ""


@cache
def read_table(name: str = "others.yaml") -> dict[str, Any]:
    return read_value(Path(__file__).with_name(name).read_text(encoding="utf-8"))


@cache
def table() -> dict[str, list[Row]]:
    """Return the rows of each trainer, in the table's order."""
    rows = [*read_table()["same"]]
    for end, name in (("lost", "why"), ("irrelevant", "irrelevant")):
        rows += [{name: reason, **row} for reason, row in read_table()[end].items()]
    return {trainer: [*_rows(rows, trainer)] for trainer in (*TRAINERS, HINTS)}


def _rows(rows: list[dict[str, Any]], trainer: str) -> Iterator[Row]:
    for row in (row for row in rows if trainer in row):
        # Without ``names`` the row is read once, and "$" stands for the last part of a key.
        fields = {key: row[key] for key in row if key not in (*TRAINERS, HINTS, "names")}
        for name in row.get("names", "$").split():
            for word in row[trainer].replace("$", name).split():
                # ``.actor.ppo_epochs=1``: verl's ``actor_rollout_ref.actor.ppo_epochs``; 1 asks for nothing.
                theirs, _, neutral = re.sub(r"^\.", "actor_rollout_ref.", word).partition("=")
                last = theirs.rpartition(".")[2] if name == "$" else name
                own = {key: fields[key].replace("$", last) for key in ("ours", "part") if key in fields}
                yield Row(theirs, tuple(filter(None, neutral.lower().split("|"))), **fields | own)


def row_of(trainer: str, key: str) -> Row | None:
    """Return the row of a key: its own, or else the first whose name fits."""
    rows = table()[trainer]
    exact = (row for row in rows if row.theirs == key)
    return next(exact, None) or next((row for row in rows if fnmatchcase(key, row.theirs)), None)


def defaults(trainer: str, version: str = "") -> dict[str, Any]:
    """Return what a trainer does where a key is left out, in its ``version`` (default: the newest known)."""
    told = read_table("others_defaults.yaml")
    first, last = told["versions"][trainer]
    most = _numbers(version or last)
    if not _numbers(first) <= most[:2] <= _numbers(last):
        raise ValueError(f"--from {trainer}@{version}: expected a version from {first} to {last}")
    # ``{"0": 0.001, "0.4": 0}``: values from a version on; the last that is not newer holds.
    since = {key: value if isinstance(value, dict) else {"0": value} for key, value in told[trainer].items()}
    known = {key: [value[new] for new in value if _numbers(new) <= most] for key, value in since.items()}
    return {key: values[-1] for key, values in known.items() if values}


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)))
