"""Tasks of reasoning-gym: a mix of procedural generators, with weights and difficulties.

``path`` is a YAML file in the format of reasoning-gym's own ``composite`` data set::

    size: 20000
    seed: 1
    datasets:
      - {name: chain_sum, weight: 2, config: {min_terms: 2, max_terms: 6}}
      - {name: countdown, weight: 1, config: {}}

Row n is generated when it is drawn, from the file alone. Its gold holds what the grader needs.
"""

from __future__ import annotations

import ast
import difflib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from megatron_eqlen.data.rows import BadRow, Problem, Tally

INSTRUCTION = (
    "Think step by step, then give your final answer between <answer> and </answer> tags, without "
    "explanation. If there is an example, follow the format of its answer."
)
PACKAGE = "reasoning-gym>=0.1.25,<0.2"
NOT_GENERATED = "not_generated"
KEYS = {"size", "seed", "datasets"}


class TaskRows(Sequence[Problem]):
    """The rows of a mix, generated when they are asked for. Raises ValueError for a file that is no mix, and
    BadRow for a row that its task cannot generate."""

    def __init__(self, path: Path) -> None:
        self._mix = _read_mix(path)
        self._configs = {spec.name: spec.config for spec in self._mix.config.datasets}

    def __len__(self) -> int:
        return self._mix.size

    def __getitem__(self, number: int) -> Problem:
        if not 0 <= number < len(self):
            raise IndexError(number)
        try:
            entry = self._mix[number]
        except (ValueError, RuntimeError) as error:  # some generators give up after a number of attempts
            raise BadRow(NOT_GENERATED, str(error)) from None
        task = entry["metadata"]["source_dataset"]
        gold = {"answer": entry["answer"], "task": task, "config": self._configs[task], "entry": entry}
        text = _literal(gold)
        row_id = f"{task}#{number}"
        return Problem(
            row_id, entry["question"], text, "reasoning_gym", instruction=INSTRUCTION, gold_checked=True
        )


def read(path: Path, tally: Tally) -> Iterator[Problem]:
    """Yield all rows of a mix that can be generated."""
    rows = TaskRows(path)
    for number in range(len(rows)):
        try:
            yield rows[number]
        except BadRow as bad:
            tally.drop(f"{path}: #{number}", bad.reason, bad.detail)


def _literal(gold: dict[str, Any]) -> str:
    """Return the gold as a Python literal: JSON would turn tuples into lists, which some scorers compare."""
    text = repr(_plain(gold))
    try:
        same = ast.literal_eval(text) == gold
    except (ValueError, SyntaxError):
        same = False
    if not same:
        raise ValueError(f"reasoning_gym: {gold['task']}: expected plain values, found {text:.200}")
    return text


def _plain(value: Any) -> Any:
    """Return ``value`` with Python's numbers and texts in place of NumPy's."""
    if isinstance(value, dict):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(_plain, value))
    return value.item() if isinstance(value, np.generic) else value


def _read_mix(path: Path) -> Any:
    try:
        from reasoning_gym.composite import CompositeConfig, CompositeDataset
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise ValueError(f"reader reasoning_gym: {error}: .venv/bin/pip install '{PACKAGE}'") from None
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"{path}: not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(raw, dict) or raw.keys() != KEYS or type(raw["seed"]) is not int:
        raise ValueError(f"{path}: expected size, seed (a number) and datasets, found {raw!s:.200}")
    for number, task in enumerate(raw["datasets"]):
        if task.get("name") not in DATASETS:
            near = difflib.get_close_matches(str(task.get("name")), DATASETS, n=1, cutoff=0.0)[0]
            raise ValueError(
                f"{path}: datasets.{number}.name: no task {task.get('name')!r} (nearest: {near!r})"
            )
        task.setdefault("config", {})
        task.setdefault("weight", 1.0)
    try:
        config = CompositeConfig.from_yaml_stream(yaml.safe_dump(raw))
        return CompositeDataset(config)
    except (AssertionError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: reasoning-gym refuses it: {error}") from None
