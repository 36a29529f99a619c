"""Keys of other trainers and ours: the table ``others.yaml``, and the hint for an unknown key from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
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
def table() -> dict[str, list[Row]]:
    """Return the rows of each trainer, in the table's order."""
    parts = read_value(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
    return {
        trainer: [
            Row(theirs, **{"computed" if field == "as" else field: value for field, value in row.items()})
            for theirs, row in rows.items()
        ]
        for trainer, rows in parts.items()
    }


def hint(name: str) -> str | None:
    """Return our key or section for another trainer's name: the last part of its key, in any case."""
    wanted = name.lower().replace("-", "_")
    rows = (row for trainer in (HINTS, *TRAINERS) for row in table()[trainer])
    known = (row.ours for row in rows if row.ours and row.theirs.rpartition(".")[2].lower() == wanted)
    return next(known, None)
