"""Tasks of reasoning-gym: a reader of mixes of its procedural generators, and a grader by their own scores.

    {name: tasks, reader: "recipes.reasoning_gym_tasks:read", path: recipes/tasks/reasoning_gym_easy.yaml}

``path`` is a YAML file in the format of reasoning-gym's own ``composite`` data set::

    size: 20000
    seed: 1
    datasets:
      - {name: chain_sum, weight: 2, config: {min_terms: 2, max_terms: 6}}
      - {name: countdown, weight: 1, config: {}}

Row n is generated when it is drawn, from the file alone. Its gold holds what the grader needs.

    response ──last <answer>──► worker ──► sandbox: score_answer(answer, entry) ──► reward in [0, 1]

Several tasks evaluate the answer as Python (``eval``, SymPy's ``parse_expr``), so that a model could run
programs: therefore they get the isolation of programs.
"""

from __future__ import annotations

import ast
import difflib
import json
import logging
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import Field, ValidationError

from megatron_eqlen.data.rows import BadRow, Problem, Tally
from megatron_eqlen.graders.code import judge
from megatron_eqlen.graders.grader import PoolGrader, answer_section, known
from megatron_eqlen.graders.sandbox.client import EXTRA_SECONDS, SandboxError
from megatron_eqlen.graders.sandbox.probe import required_isolation
from megatron_eqlen.graders.sandbox.program import Limits
from megatron_eqlen.graders.workers.pool import WorkerPool
from megatron_eqlen.recipe import RewardRecipe
from megatron_eqlen.recipe.load import explain, read_yaml
from megatron_eqlen.recipe.plugins import typed
from megatron_eqlen.recipe.schema import PositiveFloat, PositiveInt, Section
from megatron_eqlen.rewards.functions import reference, referred
from megatron_eqlen.types import Grade

log = logging.getLogger(__name__)

INSTRUCTION = (
    "Think step by step, then give your final answer between <answer> and </answer> tags, without "
    "explanation. If there is an example, follow the format of its answer."
)
GRADER = f"{__name__}:ReasoningGymGrader"
PACKAGE = "reasoning-gym>=0.1.25,<0.2"


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
            raise BadRow("not_generated", str(error)) from None
        task = entry["metadata"]["source_dataset"]
        asked = _literal({"task": task, "config": self._configs[task], "entry": entry})
        gold = reference(str(entry["answer"]), {"asked": asked})
        return Problem(f"{task}#{number}", entry["question"], gold, GRADER, instruction=INSTRUCTION)

    def __iter__(self) -> Iterator[Problem]:
        """Yield the rows that can be generated."""
        for number in range(len(self)):
            with suppress(BadRow):
                yield self[number]


def read(path: Path, tally: Tally) -> TaskRows:
    """Return the rows of a mix, none of them generated yet."""
    return TaskRows(path)


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
    try:  # recipes can be read without the package
        from reasoning_gym.composite import CompositeConfig, CompositeDataset, DatasetSpec
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise ValueError(f"{error}: .venv/bin/pip install '{PACKAGE}'") from None
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
        specs.append(
            DatasetSpec(task.name, task.weight, typed(task.config, f"{where}.config", schema, "python"))
        )
    try:
        return CompositeDataset(CompositeConfig(mix.size, mix.seed, specs))
    except (AssertionError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: reasoning-gym refuses it: {error}") from None


# ---- grader ----------------------------------------------------------------------------------------------

LONGEST = 20_000
"""Characters at the end of a response in which the answer is looked for."""
PROGRAM = """
import ast
import reasoning_gym

def score(gold, answer):
    gold = ast.literal_eval(gold)
    data = reasoning_gym.create_dataset(gold["task"], **gold["config"])
    return float(data.score_answer(answer, gold["entry"]))
"""


class ReasoningGymGrader(PoolGrader):
    """Grades answers to reasoning-gym's tasks; the gold holds a Python literal of task, config and
    entry."""

    def __init__(self, reward: RewardRecipe) -> None:
        self.name = f"reasoning-gym-{version('reasoning-gym')}"
        self._reward = reward
        self._failed: set[str] = set()
        """Tasks whose scorer has failed on an answer."""

    def begin(self, text: str, gold: str) -> Future[Grade]:
        """Start grading a response: correct, partial, wrong, no_answer, or how its scorer ended
        (runtime_error, time_limit, memory_limit)."""
        from reasoning_gym.utils import extract_answer

        answer = extract_answer(answer_section(text, LONGEST))
        if answer is None:
            return known(Grade(0.0, "no_answer", None, self.name))
        cpu = self._reward.timeout
        limits = Limits(cpu, 4 * cpu + 2, self._reward.code_memory_mb, output_bytes=1 << 20)
        asked = referred(gold)[1]["asked"]
        arguments = "\n".join(json.dumps(text) for text in (asked, answer))
        item = {"program": PROGRAM, "stdin": arguments, "limits": asdict(limits), "function": "score"}
        longest = limits.wall_seconds + EXTRA_SECONDS
        return self.pool.submit(
            item, longest, partial(self._grade, answer, asked), wall_factor=1.0, attempts=2
        )

    def _make_pool(self) -> WorkerPool:
        isolation = required_isolation(self._reward.code_sandbox, sys.executable)
        assert self._reward.workers is not None, "the scorer has asked the machine"
        return WorkerPool(__name__, self._reward.workers, {"isolation": asdict(isolation)})

    def _grade(self, answer: str, asked: str, ended: dict[str, Any]) -> Grade:
        if "status" not in ended:
            raise SandboxError(f"reasoning-gym: no verdict on an answer: {ended}")
        shown = " ".join(answer.split())[:200]
        if ended["status"] != "finished":
            task = ast.literal_eval(asked)["task"]
            if task not in self._failed:
                self._failed.add(task)
                log.warning("reasoning-gym: %s: %s: %s", task, ended["status"], ended["error"])
            return Grade(0.0, ended["status"], shown, self.name, ended["seconds"], ended["error"])
        reward = _fraction(ended["result"])
        verdict = "correct" if reward == 1 else "partial" if reward else "wrong"
        return Grade(reward, verdict, shown, self.name, ended["seconds"])


def _fraction(result: str) -> float:
    """Return the reward that the sandboxed process reported; 0 for anything but a number in [0, 1]."""
    try:
        reward = json.loads(result)
    except ValueError:
        return 0.0
    return float(reward) if isinstance(reward, int | float) and 0 <= reward <= 1 else 0.0


def make_handler(isolation: dict[str, bool]) -> Any:
    """Return the handler of a worker, which is forked with the package."""
    import reasoning_gym

    assert reasoning_gym.create_dataset
    return judge.make_handler(isolation)
