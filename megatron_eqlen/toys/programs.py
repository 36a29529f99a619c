"""Tiny programs with tests, in OpenCodeReasoning's schema: graded by the sandbox, like real ones.

A question is ``Read integers from one line. Keep those that are even. Print the sum of their squares.``; its
tests are lines of numbers and what a right program prints. As in the real set, rows of OpenCodeReasoning
(``split_0``) hold question and worked response, and the tests lie in the source set that a row names: TACO.

Everything is a function of the seed. The rows of one call have distinct questions.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from megatron_eqlen.files import replaced

TESTS = 6
"""Number of tests per problem."""
LARGEST = 20
OCR_COLUMNS = (
    "id", "input", "output", "source", "license", "dataset", "split", "difficulty", "solution",
)  # fmt: skip


@dataclass(frozen=True)
class Part:
    """A piece of a program: its words, its Python, and what it does."""

    words: str
    code: str
    does: Callable


def _keeps() -> list[Part]:
    """Return the filters: which numbers a program keeps."""
    parts = [
        Part("that are even", "x % 2 == 0", lambda x: x % 2 == 0),
        Part("that are odd", "x % 2 == 1", lambda x: x % 2 == 1),
        Part("that are negative", "x < 0", lambda x: x < 0),
    ]
    for limit in range(-5, 11):
        parts += [
            Part(f"above {limit}", f"x > {limit}", lambda x, limit=limit: x > limit),
            Part(f"below {limit}", f"x < {limit}", lambda x, limit=limit: x < limit),
        ]
    return parts


VALUES = (
    Part("them", "x", lambda x: x),
    Part("their squares", "x * x", lambda x: x * x),
    Part("their doubles", "2 * x", lambda x: 2 * x),
    Part("their absolute values", "abs(x)", abs),
)
RESULTS = (
    Part("the sum of", "sum(values)", sum),
    Part("the largest of", "max(values, default=0)", lambda values: max(values, default=0)),
    Part("the smallest of", "min(values, default=0)", lambda values: min(values, default=0)),
    Part("how many different numbers are among", "len(set(values))", lambda values: len(set(values))),
)
OF_NOTHING = "The largest and the smallest of no numbers are 0."


@dataclass(frozen=True)
class Task:
    """Read integers, keep some, print one number."""

    keep: Part
    value: Part
    result: Part

    @property
    def question(self) -> str:
        return (
            f"Read integers from one line. Keep those {self.keep.words}. Print {self.result.words} "
            f"{self.value.words}. {OF_NOTHING}"
        )

    @property
    def solution(self) -> str:
        return (
            "numbers = map(int, input().split())\n"
            f"values = [{self.value.code} for x in numbers if {self.keep.code}]\n"
            f"print({self.result.code})\n"
        )

    def answer(self, numbers: Iterable[int]) -> int:
        return self.result.does([self.value.does(x) for x in numbers if self.keep.does(x)])

    def tests(self, rng: random.Random) -> dict[str, list[str]]:
        """TACO's ``input_output``: lines of stdin, and the output of each."""
        lines = [[rng.randint(-LARGEST, LARGEST) for _ in range(rng.randint(1, 9))] for _ in range(TESTS)]
        return {
            "inputs": [" ".join(map(str, line)) + "\n" for line in lines],
            "outputs": [f"{self.answer(line)}\n" for line in lines],
        }


TASKS = [Task(*parts) for parts in product(_keeps(), VALUES, RESULTS)]


def make_rows(count: int, seed: int) -> tuple[list[dict], list[dict]]:
    """Return ``count`` rows of OpenCodeReasoning and the records of TACO with their tests. Raises ValueError
    if there are fewer distinct programs."""
    if count > len(TASKS):
        raise ValueError(f"count: expected at most {len(TASKS)} programs, found {count}")
    rng = random.Random(seed)
    tasks = rng.sample(TASKS, count)
    rows = [_row(number, task) for number, task in enumerate(tasks)]
    records = [
        {"question": task.question, "input_output": json.dumps(task.tests(rng)), "starter_code": ""}
        for task in tasks
    ]
    return rows, records


def _row(number: int, task: Task) -> dict[str, str]:
    response = f"```python\n{task.solution}```"
    values = (
        f"program-{number}", task.question, response, "synthetic", "mit", "taco", "train", "EASY",
        task.solution,
    )  # fmt: skip
    return dict(zip(OCR_COLUMNS, values, strict=True))


def write(out: Path, rows: list[dict], records: list[dict]) -> None:
    """Write OUT/split_0/train.parquet and OUT/tests/taco/train.parquet, each complete or not at all."""
    for path, table in ((out / "split_0/train.parquet", rows), (out / "tests/taco/train.parquet", records)):
        path.parent.mkdir(parents=True, exist_ok=True)
        with replaced(path) as partial:
            pq.write_table(pa.Table.from_pylist(table), partial)
        print(f"{path}: {len(table)} programs")
