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
from typing import Annotated, Any

import numpy as np
from pydantic import Field, ValidationError

from megatron_eqlen.data.rows import BadRow, Problem, Tally
from megatron_eqlen.recipe.load import explain, read_yaml
from megatron_eqlen.recipe.plugins import typed
from megatron_eqlen.recipe.schema import PositiveFloat, PositiveInt, Section

INSTRUCTION = (
    "Think step by step, then give your final answer between <answer> and </answer> tags, without "
    "explanation. If there is an example, follow the format of its answer."
)
PACKAGE = "reasoning-gym>=0.1.25,<0.2"
NOT_GENERATED = "not_generated"


class _Task(Section):
    name: str
    weight: PositiveFloat = 1.0
    config: dict[str, Any] = {}  # noqa: RUF012 - pydantic copies it


class _Mix(Section):
    size: PositiveInt
    seed: int
    datasets: Annotated[list[_Task], Field(min_length=1)]


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
        from reasoning_gym.composite import CompositeConfig, CompositeDataset, DatasetSpec
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise ValueError(f"reader reasoning_gym: {error}: .venv/bin/pip install '{PACKAGE}'") from None
    try:
        mix = _Mix.model_validate(read_yaml(path))
    except ValidationError as error:
        raise ValueError(f"{path}: {explain(error, _Mix)}") from None
    specs = []
    # our own errors first: reasoning-gym's name no file and no key
    for number, task in enumerate(mix.datasets):
        where = f"{path}: datasets.{number}"
        if task.name not in DATASETS:
            near = difflib.get_close_matches(task.name, DATASETS, n=1, cutoff=0.0)[0]
            raise ValueError(f"{where}.name: no task {task.name!r} (nearest: {near!r})")
        schema = DATASETS[task.name][1]
        if unknown := sorted(task.config.keys() - schema.__dataclass_fields__.keys()):
            near = difflib.get_close_matches(unknown[0], schema.__dataclass_fields__, n=1, cutoff=0.0)[0]
            raise ValueError(f"{where}.config: unknown key {unknown[0]!r} (nearest: {near!r})")
        specs.append(DatasetSpec(task.name, task.weight, typed(task.config, f"{where}.config", schema)))
    try:
        return CompositeDataset(CompositeConfig(mix.size, mix.seed, specs))
    except (AssertionError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: reasoning-gym refuses it: {error}") from None
