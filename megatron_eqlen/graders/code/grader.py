"""The code grader: does the program in a response pass every test?

    response ──last fenced block after </think>──► program ──► sandbox ──► verdict

Programs never run in the trainer: each test is a locked-down process under a worker that can be killed.
"""

from __future__ import annotations

import re
from concurrent.futures import Future
from dataclasses import asdict
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

from megatron_eqlen.graders.code.tests import CodeTests
from megatron_eqlen.graders.grader import PoolGrader, answer_section, known
from megatron_eqlen.graders.sandbox.client import EXTRA_SECONDS, SandboxError
from megatron_eqlen.graders.sandbox.probe import find_python, required_isolation
from megatron_eqlen.graders.sandbox.program import Limits
from megatron_eqlen.graders.workers.pool import WorkerPool
from megatron_eqlen.types import Grade

if TYPE_CHECKING:
    from megatron_eqlen.recipe import RewardRecipe

VERSION = 5
"""Raised whenever a change here or in ``code/tests.py`` changes a verdict."""
LONGEST_PROGRAM = 100_000
LONGEST_SECTION = 4 * LONGEST_PROGRAM
"""Characters at the end of a response in which the program is looked for."""
ATTEMPTS = 2
"""Most attempts at a program: the sandbox's failures are not the program's fault at first."""
WORKER_MODULE = "megatron_eqlen.graders.code.judge"
parse_tests = lru_cache(maxsize=4096)(CodeTests.from_json)

_FENCE = re.compile(r"^[ \t]*+(?P<fence>`{3,}+|~{3,}+)(?P<info>[^\n`]*+)$\n?", re.MULTILINE)
_PYTHON = re.compile(r"[ \t]*py", re.IGNORECASE)


def extract_program(text: str) -> str | None:
    """Return the last fenced block after the last ``</think>``, None if there is none. A fence is three or
    more backticks or tildes; it ends with at least as many. A fence that never ends holds no answer, nor does
    one that is interrupted by a new ``` ```python ``` line."""
    answer = answer_section(text, LONGEST_SECTION)
    program, opened = None, None
    for line in _FENCE.finditer(answer):
        # The first fence opens, and a new Python fence starts again: the one before it never ended.
        if opened is None or (_PYTHON.match(line["info"]) and line["fence"][0] == opened["fence"][0]):
            opened = line
        elif line["fence"].startswith(opened["fence"]):
            program, opened = answer[opened.end() : line.start()], None
    return program if program and program.strip() else None


class CodeGrader(PoolGrader):
    name = f"code-{VERSION}"

    def __init__(self, reward: RewardRecipe) -> None:
        self._reward = reward

    def begin(self, text: str, gold: str) -> Future[Grade]:
        """Start grading a response: reward 1 only if its program passes all tests.

        Verdicts: passed, wrong_answer, time_limit, memory_limit, output_limit, runtime_error, compile_error,
        no_answer. ``Grade.detail`` names the first failing test. The future may raise SandboxError.
        """
        program = extract_program(text)
        if program is None:
            return known(Grade(0.0, "no_answer", None, self.name))
        shown = f"{len(program)} characters of Python"
        if len(program) > LONGEST_PROGRAM:
            longer = f"longer than {LONGEST_PROGRAM} characters"
            return known(Grade(0.0, "compile_error", shown, self.name, detail=longer))
        tests = parse_tests(gold)
        # Limits of the problem, where it has its own; its expected outputs must fit in any case.
        cpu = tests.time_limit or self._reward.code_timeout
        memory = max(self._reward.code_memory_mb, int(tests.memory_mb or 0))
        output = max(Limits.output_bytes, 2 * tests.largest_output)
        limits = Limits(cpu_seconds=cpu, wall_seconds=4 * cpu + 2, memory_mb=memory, output_bytes=output)
        # A checker is another program, run after each test.
        runs = len(tests.inputs) * (1 if tests.checker is None else 2)
        stuck = runs * (limits.wall_seconds + 1.0) + EXTRA_SECONDS  # the worker, not its program
        item = {"program": program, "tests": gold, "limits": asdict(limits)}
        return self.pool.submit(item, stuck, partial(self._grade, shown), wall_factor=1.0, attempts=ATTEMPTS)

    def _make_pool(self) -> WorkerPool:
        workers = self._reward.workers
        assert workers is not None, "the scorer has asked the machine"
        python = find_python(self._reward.code_python)
        isolation = asdict(required_isolation(self._reward.code_sandbox, python))
        return WorkerPool(WORKER_MODULE, workers, {"isolation": isolation, "python": python})

    def _grade(self, shown: str, answer: dict[str, Any]) -> Grade:
        if "verdict" not in answer:
            raise SandboxError(f"code sandbox: no verdict on a program in {ATTEMPTS} attempts: {answer}")
        passed = answer["verdict"] == "passed"
        return Grade(float(passed), answer["verdict"], shown, self.name, answer["seconds"], answer["detail"])
