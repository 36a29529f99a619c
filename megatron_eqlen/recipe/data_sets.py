"""Data sets that have a reader's name, and the release dates of models: the table ``data_sets.yaml``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_eqlen.hf.dataset_files import SUFFIXES
from megatron_eqlen.recipe.yaml_values import read_value

_TABLE: dict[str, Any] = read_value(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
TRAINING, BENCHMARKS = _TABLE["training"], _TABLE["benchmarks"]
"""By reader: ``path`` on the hub, perhaps ``config``, ``split`` and ``released``, the day of publication."""


def with_defaults(section: Any) -> Any:
    """Return a section's keys over path (and for folders config and split) of its reader's data set."""
    rows = TRAINING | BENCHMARKS
    if not isinstance(section, dict) or str(section.get("reader")) not in rows:
        return section
    row = {key: value for key, value in rows[section["reader"]].items() if key != "released"}
    is_file = Path(str(section.get("path", row["path"]))).suffix in SUFFIXES
    return ({"path": row["path"]} if is_file else row) | section


def model_release(path: str) -> str | None:
    """Return the day on which the model of a hub name or folder was released; None if it is not known."""
    known = [name for name in _TABLE["models"] if Path(path).name.startswith(name)]
    # The longest name that fits is the most specific one.
    return _TABLE["models"][max(known, key=len)] if known else None
