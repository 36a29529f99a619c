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
from dataclasses import asdict
from functools import lru_cache
from typing import Any, Literal

from megatron_eqlen.rewards.code_tests import CodeTests
from megatron_eqlen.rewards.program import Isolation, Limits
from megatron_eqlen.rewards.sandbox import EXTRA_SECONDS, SandboxError
from megatron_eqlen.rewards.sandbox_server import SandboxServer
from megatron_eqlen.rewards.workers import WorkerPool
from megatron_eqlen.types import Grade

log = logging.getLogger(__name__)

VERSION = 2
"""Raised whenever a change here or in ``code_tests`` changes a verdict."""
LONGEST_PROGRAM = 100_000
"""Characters."""
AS_ROOT = f" (programs run as root: nobody cannot read Python's folder {sys.prefix} or its parents)"
WORKER_MODULE = "megatron_eqlen.rewards.code_worker"

_FENCE = re.compile(r"^[ \t]*+(?P<fence>`{3,}+|~{3,}+)(?P<info>[^\n`]*+)$\n?", re.MULTILINE)
_PYTHON = re.compile(r"[ \t]*py", re.IGNORECASE)


def extract_program(text: str) -> str | None:
    """The last fenced block after the last ``</think>``, None if there is none.

    A fence is three or more backticks or tildes; it ends with at least as many. A fence that never ends holds
    no answer, nor does one that is interrupted by a new ``` ```python ``` line.
    """
    answer = text.rpartition("</think>")[2][-4 * LONGEST_PROGRAM :]
    program, opened = None, None
    for line in _FENCE.finditer(answer):
        if opened is None or (_PYTHON.match(line["info"]) and line["fence"][0] == opened["fence"][0]):
            opened = line
        elif line["fence"].startswith(opened["fence"]):
            program, opened = answer[opened.end() : line.start()], None
    return program if program and program.strip() else None


def extract_as_livecodebench(text: str) -> str | None:
    """As LiveCodeBench's ``extract_code``: the lines between the last two that hold three backticks."""
    lines = text.rpartition("</think>")[2].split("\n")
    fences = [number for number, line in enumerate(lines) if "```" in line]
    return "\n".join(lines[fences[-2] + 1 : fences[-1]]) if len(fences) > 1 else None


class CodeGrader:
    """Grades responses to code problems. The sandbox starts with the first program."""

    def __init__(
        self,
        workers: int = 2,
        timeout: float = 6.0,
        memory_mb: int = 1024,
        sandbox: Literal["strict", "best_effort"] = "strict",
        sandbox_url: str | None = None,
        lcb_strict: bool = False,
    ) -> None:
        assert not (sandbox_url and lcb_strict), "the recipe's check refuses it"
        self._workers = workers
        self._timeout = timeout
        self._memory_mb = memory_mb
        self._mode = sandbox
        self._lcb_strict = lcb_strict
        self._server = SandboxServer(sandbox_url, workers) if sandbox_url else None
        self._pool: WorkerPool | None = None
        self.isolation: Isolation | None = None
        """The isolation in force; None before the sandbox starts."""

    @property
    def name(self) -> str:
        return f"code-{VERSION}" + "-lcb_strict" * self._lcb_strict + "@server" * (self._server is not None)

    def grade(self, texts: Sequence[str], golds: Sequence[str]) -> list[Grade]:
        """A grade for each response against its tests; reward 1 only if all pass.

        Verdicts: passed, wrong_answer, time_limit, memory_limit, output_limit, runtime_error,
        compile_error, no_answer. ``Grade.detail`` names the first failing test. Raises SandboxError if no
        verdict can be given.
        """
        programs = [self._extract(text, gold) for text, gold in zip(texts, golds, strict=True)]
        jobs = list(dict.fromkeys((program, gold) for program, gold in zip(programs, golds, strict=True)))
        runnable = [(code, gold) for code, gold in jobs if code is not None and len(code) <= LONGEST_PROGRAM]
        items = [self._item(program, gold) for program, gold in runnable]
        judged: dict[tuple[str | None, str], dict[str, Any]] = dict(
            zip(runnable, self._judge(items), strict=True)
        )
        return [self._grade(job, judged.get(job)) for job in zip(programs, golds, strict=True)]

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def _extract(self, text: str, gold: str) -> str | None:
        strict = self._lcb_strict and _parse_tests(gold).livecodebench
        return extract_as_livecodebench(text) if strict else extract_program(text)

    def _item(self, program: str, gold: str) -> dict[str, Any]:
        tests = _parse_tests(gold)
        cpu = tests.time_limit or self._timeout
        memory = max(self._memory_mb, int(tests.memory_mb or 0))
        limits = Limits(cpu_seconds=cpu, wall_seconds=4 * cpu + 2, memory_mb=memory)
        return {"program": program, "tests": gold, "limits": asdict(limits), "lcb_strict": self._lcb_strict}

    def _judge(self, items: list[dict[str, Any]]) -> list[dict[str, Any]]:
        if not items:
            return []
        if self._server is not None:
            return [asdict(judgement) for judgement in self._server.judge(items)]
        if self._pool is None:
            self._pool = self._start()
        answers = self._pool.map(items, [_longest(item) for item in items], wall_factor=1.0)
        again = [number for number, answer in enumerate(answers) if "verdict" not in answer]
        if again:
            log.warning("code sandbox: %s; %d programs tried again", answers[again[0]], len(again))
            retried = self._pool.map([items[n] for n in again], [_longest(items[n]) for n in again], 1.0)
            for number, answer in zip(again, retried, strict=True):
                answers[number] = answer if "verdict" in answer else _failed_twice(answer)
        return answers

    def _start(self) -> WorkerPool:
        """Find out which isolation works; refuse too little; log what is in force."""
        self.isolation = offered_isolation()
        if not self.isolation.strict and self._mode == "strict":
            raise ValueError(
                "reward.code_sandbox: strict needs Landlock and seccomp, this machine offers "
                f"{self.isolation}; set reward.sandbox_url, or accept less with code_sandbox: best_effort"
            )
        as_root = self.isolation.as_root
        level = logging.WARNING if as_root or not self.isolation.strict else logging.INFO
        log.log(level, "code sandbox: %s%s", self.isolation, AS_ROOT if as_root else "")
        return WorkerPool(WORKER_MODULE, self._workers, {"isolation": asdict(self.isolation)})

    def _grade(self, job: tuple[str | None, str], judged: dict[str, Any] | None) -> Grade:
        program, _ = job
        if program is None:
            return Grade(0.0, "no_answer", None, self.name)
        shown = f"{len(program)} characters of Python"
        if judged is None:
            return Grade(
                0.0, "compile_error", shown, self.name, detail=f"longer than {LONGEST_PROGRAM} characters"
            )
        passed = judged["verdict"] == "passed"
        return Grade(float(passed), judged["verdict"], shown, self.name, judged["seconds"], judged["detail"])


@lru_cache(maxsize=1)
def offered_isolation() -> Isolation:
    """The strongest isolation that works on this machine, tried once in a process of its own."""
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
    """Seconds after which the worker itself must be stuck, not its program."""
    tests = _parse_tests(item["tests"])
    return len(tests.inputs) * (item["limits"]["wall_seconds"] + 1.0) + EXTRA_SECONDS


def _failed_twice(answer: dict[str, Any]) -> dict[str, Any]:
    raise SandboxError(f"code sandbox: no verdict on a program in two attempts: {answer}")
