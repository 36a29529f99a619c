"""The grader of reasoning-gym's tasks: each task's own ``score_answer``, in the sandbox.

    response ──last <answer>──► worker ──► sandbox: score_answer(answer, entry) ──► reward in [0, 1]

Several tasks evaluate the answer as Python (``eval``, SymPy's ``parse_expr``), so that a model could run
programs: therefore they get the isolation of programs.
"""

from __future__ import annotations

import ast
import json
import logging
import sys
from concurrent.futures import Future
from dataclasses import asdict
from functools import partial
from importlib.metadata import version
from typing import Any

import reasoning_gym
from reasoning_gym.utils import extract_answer

from megatron_eqlen.graders.code import judge
from megatron_eqlen.graders.grader import PoolGrader, answer_section, known
from megatron_eqlen.graders.sandbox.client import EXTRA_SECONDS, SandboxError
from megatron_eqlen.graders.sandbox.probe import required_isolation
from megatron_eqlen.graders.sandbox.program import Limits
from megatron_eqlen.graders.workers.pool import WorkerPool
from megatron_eqlen.recipe import RewardRecipe
from megatron_eqlen.types import Grade

log = logging.getLogger(__name__)

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
    """Grades answers to reasoning-gym's tasks; the gold is a Python literal with task, config and entry."""

    name = f"reasoning-gym-{version('reasoning-gym')}"

    def __init__(self, reward: RewardRecipe) -> None:
        self._reward = reward
        self._failed: set[str] = set()
        """Tasks whose scorer has failed on an answer."""

    def begin(self, text: str, gold: str) -> Future[Grade]:
        """Start grading a response: correct, partial, wrong, no_answer, or how its scorer ended
        (runtime_error, time_limit, memory_limit)."""
        answer = extract_answer(answer_section(text, LONGEST))
        if answer is None:
            return known(Grade(0.0, "no_answer", None, self.name))
        cpu = self._reward.timeout
        limits = Limits(cpu, 4 * cpu + 2, self._reward.code_memory_mb, output_bytes=1 << 20)
        arguments = "\n".join(json.dumps(text) for text in (gold, answer))
        item = {"program": PROGRAM, "stdin": arguments, "limits": asdict(limits), "function": "score"}
        longest = limits.wall_seconds + EXTRA_SECONDS
        return self.pool.submit(
            item, longest, partial(self._grade, answer, gold), wall_factor=1.0, attempts=2
        )

    def _make_pool(self) -> WorkerPool:
        isolation = required_isolation(self._reward.code_sandbox, sys.executable)
        assert self._reward.workers is not None, "the scorer has asked the machine"
        return WorkerPool(__name__, self._reward.workers, {"isolation": asdict(isolation)})

    def _grade(self, answer: str, gold: str, ended: dict[str, Any]) -> Grade:
        if "status" not in ended:
            raise SandboxError(f"reasoning-gym: no verdict on an answer: {ended}")
        shown = " ".join(answer.split())[:200]
        if ended["status"] != "finished":
            task = ast.literal_eval(gold)["task"]
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


make_handler = judge.make_handler
assert reasoning_gym.create_dataset  # imported here once: workers and their sandboxes are forked with it
