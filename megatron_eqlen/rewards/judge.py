"""The verdict on a program: run its tests in order, stop at the first that fails."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megatron_eqlen.rewards.code_tests import CodeTests
from megatron_eqlen.rewards.program import Limits
from megatron_eqlen.rewards.sandbox import Run

RunProgram = Callable[[str, str, Limits, str | None], Run]
"""``run(source, stdin, limits, function)``: in the local sandbox, or on a server."""

LONGEST_DETAIL = 400


@dataclass(frozen=True)
class Judgement:
    verdict: str
    """``passed``, ``wrong_answer``, or a Run's status."""
    detail: str
    """The first failing test, empty where all passed."""
    seconds: float


def judge(program: str, tests: CodeTests, limits: Limits, run: RunProgram) -> Judgement:
    """Passed only if every test passes."""
    seconds = 0.0
    for number in range(len(tests.inputs)):
        ended = run(program, tests.stdin(number), limits, tests.function)
        seconds += ended.seconds
        where = f"test {number + 1} of {len(tests.inputs)}"
        if ended.status != "finished":
            return Judgement(ended.status, _line(f"{where}: {ended.error}"), seconds)
        if not tests.is_right(number, ended.stdout, ended.result):
            found = ended.stdout if tests.function is None else ended.result
            detail = f"{where}: expected {tests.outputs[number]!r:.150}, found {found!r:.150}"
            return Judgement("wrong_answer", _line(detail), seconds)
    return Judgement("passed", "", seconds)


def _line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= LONGEST_DETAIL else "..." + line[-LONGEST_DETAIL:]
