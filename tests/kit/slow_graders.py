"""A grader that works in the background and does what a response says (``tests.kit.handlers``), named by
import path."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

from megatron_eqlen.graders.grader import PoolGrader
from megatron_eqlen.graders.workers.pool import WorkerPool
from megatron_eqlen.recipe import RewardRecipe
from megatron_eqlen.types import Grade

LOG = ""
"""File in which items note that they began; a test sets it."""


class Obedient(PoolGrader):
    """A response ``NAME: WHAT`` is graded once its worker has done WHAT; right if the gold is NAME."""

    name = "obedient-1"

    def __init__(self, reward: RewardRecipe) -> None:
        self._workers = reward.workers or 1

    def begin(self, text: str, gold: str) -> Future[Grade]:
        name, _, what = text.partition(": ")
        if what == "refuse":
            raise ValueError(f"{name} is refused")

        def read(answer: dict[str, Any]) -> Grade:
            if "name" not in answer:
                raise RuntimeError(f"no verdict: {answer['failure']}")
            return Grade(float(name == gold), "done", answer["name"], self.name, answer["seconds"])

        return self.pool.submit({"name": name, "do": what}, 600.0, read)

    def _make_pool(self) -> WorkerPool:
        return WorkerPool("tests.kit.handlers", self._workers, {"log": LOG})
