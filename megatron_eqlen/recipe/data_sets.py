"""Data sets that have a reader's name, and the release dates of models: the table ``data_sets.yaml``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_eqlen.hf.dataset_files import SUFFIXES
from megatron_eqlen.recipe.yaml_values import read_value


@dataclass(frozen=True)
class DataSet:
    """A row of the table."""

    path: str
    config: str | None = None
    split: str | None = None
    released: str | None = None
    """Day on which the problems became public, ``2026-02-06``; None: not known."""


_TABLE = read_value(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
TRAINING = {name: DataSet(**row) for name, row in _TABLE["training"].items()}
BENCHMARKS = {name: DataSet(**row) for name, row in _TABLE["benchmarks"].items()}


def with_defaults(section: Any) -> Any:
    """Return a section's keys with path, configuration and split of the data set that its reader names. A
    single file has no configurations and splits."""
    rows = TRAINING | BENCHMARKS
    if not isinstance(section, dict) or str(section.get("reader")) not in rows:
        return section
    row = rows[section["reader"]]
    path = section.get("path", row.path)
    parts = {} if Path(str(path)).suffix in SUFFIXES else {"config": row.config, "split": row.split}
    return {"path": path} | {key: value for key, value in parts.items() if value} | section


def model_release(path: str) -> str | None:
    """Return the day on which the model of a hub name or folder was released; None if it is not known."""
    known = [name for name in _TABLE["models"] if Path(path).name.startswith(name)]
    return _TABLE["models"][max(known, key=len)] if known else None
