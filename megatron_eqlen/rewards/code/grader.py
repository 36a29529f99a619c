"""The code grader: does the program in a response pass every test?

    response ──last fenced block after </think>──► program ──► sandbox (here or on a server) ──► verdict

Model-written programs never run in the trainer: each test is a process of its own, locked down, under a
worker that can be killed. What isolation the machine offers is tried once, with programs that attempt to
escape.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import asdict
from functools import lru_cache
from typing import Any, Literal
from weakref import WeakValueDictionary

from megatron_eqlen.rewards.code.tests import CodeTests
from megatron_eqlen.rewards.grader import Asked, Known, Pending, answer_section
from megatron_eqlen.rewards.sandbox.client import EXTRA_SECONDS, SandboxError
from megatron_eqlen.rewards.sandbox.program import Isolation, Limits
from megatron_eqlen.rewards.sandbox.server import SandboxServer
from megatron_eqlen.rewards.workers.pool import WorkerPool
from megatron_eqlen.types import Grade

log = logging.getLogger(__name__)

VERSION = 3
"""Raised whenever a change here or in ``code_tests`` changes a verdict."""
LONGEST_PROGRAM = 100_000
"""Most characters of a program."""
LONGEST_SECTION = 4 * LONGEST_PROGRAM
"""Characters at the end of a response in which the program is looked for."""
AS_ROOT = f" (programs run as root: nobody cannot read Python's folder {sys.prefix} or its parents)"
ATTEMPTS = 2
"""Most attempts at a program: the sandbox's failures are not the program's fault at first."""
WORKER_MODULE = "megatron_eqlen.rewards.code.judge"

_FENCE = re.compile(r"^[ \t]*+(?P<fence>`{3,}+|~{3,}+)(?P<info>[^\n`]*+)$\n?", re.MULTILINE)
_PYTHON = re.compile(r"[ \t]*py", re.IGNORECASE)


def extract_program(text: str) -> str | None:
    """Return the last fenced block after the last ``</think>``, None if there is none.

    A fence is three or more backticks or tildes; it ends with at least as many. A fence that never ends holds
    no answer, nor does one that is interrupted by a new ``` ```python ``` line.
    """
    answer = answer_section(text, LONGEST_SECTION)
    program, opened = None, None
    for line in _FENCE.finditer(answer):
        if opened is None or (_PYTHON.match(line["info"]) and line["fence"][0] == opened["fence"][0]):
            opened = line
        elif line["fence"].startswith(opened["fence"]):
            program, opened = answer[opened.end() : line.start()], None
    return program if program and program.strip() else None


class CodeGrader:
    """Grades responses to code problems. The sandbox starts with the first program."""

    longest = LONGEST_SECTION

    def __init__(
        self,
        workers: int = 2,
        timeout: float = 6.0,
        memory_mb: int = 1024,
        sandbox: Literal["strict", "best_effort"] = "strict",
        sandbox_url: str | None = None,
    ) -> None:
        self._workers = workers
        self._timeout = timeout
        self._memory_mb = memory_mb
        self._mode: Literal["strict", "best_effort"] = sandbox
        self._server = SandboxServer(sandbox_url, workers) if sandbox_url else None
        self._pool: WorkerPool | None = None
        self._asked: WeakValueDictionary[tuple[str, str], Asked] = WeakValueDictionary()
        """Grades that a caller still waits for, by program and tests."""
        self.isolation: Isolation | None = None
        """The isolation in force; None before the sandbox starts."""

    @property
    def name(self) -> str:
        return f"code-{VERSION}" + "@server" * (self._server is not None)

    def begin(self, text: str, gold: str) -> Pending:
        """Start grading a response; a program that is being graded already is not run again."""
        program = extract_program(text)
        if program is None:
            return Known(Grade(0.0, "no_answer", None, self.name))
        shown = f"{len(program)} characters of Python"
        if len(program) > LONGEST_PROGRAM:
            longer = f"longer than {LONGEST_PROGRAM} characters"
            return Known(Grade(0.0, "compile_error", shown, self.name, detail=longer))
        if (asked := self._asked.get((program, gold))) is None:
            asked = Asked(self._judge(self._item(program, gold)), lambda answer: self._grade(shown, answer))
            self._asked[program, gold] = asked
        return asked

    def grade(self, texts: Sequence[str], golds: Sequence[str]) -> list[Grade]:
        """Return a grade for each response against its tests; reward 1 only if all pass.

        Verdicts: passed, wrong_answer, time_limit, memory_limit, output_limit, runtime_error, compile_error,
        no_answer. ``Grade.detail`` names the first failing test. Raises SandboxError if no verdict can be
        given.
        """
        begun = [self.begin(text, gold) for text, gold in zip(texts, golds, strict=True)]
        return [pending.result() for pending in begun]

    def cut(self) -> None:
        """Cancel grading that was begun and has no grade yet."""
        self._asked.clear()
        for judge in filter(None, (self._pool, self._server)):
            judge.cut()

    def close(self) -> None:
        for judge in filter(None, (self._pool, self._server)):
            judge.close()
        self._pool = None

    def _item(self, program: str, gold: str) -> dict[str, Any]:
        tests = _parse_tests(gold)
        cpu = tests.time_limit or self._timeout
        memory = max(self._memory_mb, int(tests.memory_mb or 0))
        output = max(Limits.output_bytes, 2 * tests.largest_output)
        limits = Limits(cpu_seconds=cpu, wall_seconds=4 * cpu + 2, memory_mb=memory, output_bytes=output)
        return {"program": program, "tests": gold, "limits": asdict(limits)}

    def _judge(self, item: dict[str, Any]) -> Future[dict[str, Any]]:
        if self._server is not None:
            return self._server.submit(item)
        if self._pool is None:
            self._pool = self._start()
        return self._pool.submit(item, _longest(item), wall_factor=1.0, attempts=ATTEMPTS)

    def _start(self) -> WorkerPool:
        """Find out which isolation works; refuse too little; log the isolation in force."""
        self.isolation = required_isolation(self._mode)
        return WorkerPool(WORKER_MODULE, self._workers, {"isolation": asdict(self.isolation)})

    def _grade(self, shown: str, answer: dict[str, Any]) -> Grade:
        if "verdict" not in answer:
            raise SandboxError(f"code sandbox: no verdict on a program in {ATTEMPTS} attempts: {answer}")
        passed = answer["verdict"] == "passed"
        return Grade(float(passed), answer["verdict"], shown, self.name, answer["seconds"], answer["detail"])


def required_isolation(mode: Literal["strict", "best_effort"]) -> Isolation:
    """Return the isolation that this machine offers, and log it. Raises ValueError if ``strict`` asks for
    more."""
    isolation = offered_isolation()
    if not isolation.strict and mode == "strict":
        raise ValueError(
            "reward.code_sandbox: strict needs Landlock and seccomp, this machine offers "
            f"{isolation}; set reward.sandbox_url, or accept less with code_sandbox: best_effort"
        )
    level = logging.WARNING if isolation.as_root or not isolation.strict else logging.INFO
    log.log(level, "code sandbox: %s%s", isolation, AS_ROOT if isolation.as_root else "")
    return isolation


@lru_cache(maxsize=1)
def offered_isolation() -> Isolation:
    """Return the strongest isolation that works on this machine, tried once in a process of its own."""
    pool = WorkerPool(WORKER_MODULE, 1)
    try:
        (answer,) = pool.map([{}], 600.0, wall_factor=1.0)
    finally:
        pool.close()
    if "landlock" not in answer:
        raise SandboxError(f"no sandbox works here: {answer}")
    return Isolation(**{name: answer[name] for name in Isolation.__dataclass_fields__})


@lru_cache(maxsize=4096)
def _parse_tests(gold: str) -> CodeTests:
    return CodeTests.from_json(gold)


def _longest(item: dict[str, Any]) -> float:
    """Return the seconds after which the worker itself, not its program, must be stuck."""
    tests = _parse_tests(item["tests"])
    return len(tests.inputs) * (item["limits"]["wall_seconds"] + 1.0) + EXTRA_SECONDS
