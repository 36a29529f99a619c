"""Run the tests of a program. The worker process here knows them; its sandbox's zygote does not."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from functools import lru_cache

from megatron_eqlen.graders.code.tests import CodeTests
from megatron_eqlen.graders.sandbox.client import Sandbox
from megatron_eqlen.graders.sandbox.program import Isolation, Limits
from megatron_eqlen.graders.workers.host import Item

LONGEST_DETAIL = 400
parse_tests = lru_cache(maxsize=16)(CodeTests.from_json)
"""Parses tests; cached, because the samples of a prompt come one after another."""
CHECK = """\
import builtins, io, json, sys
_texts = dict(zip(("input.txt", "correct_output.txt", "solution_output.txt"), json.load(sys.stdin)))
_open = builtins.open
def _of_texts(name, *given, **named):
    return io.StringIO(_texts[str(name)]) if str(name) in _texts else _open(name, *given, **named)
builtins.open = io.open = _of_texts
sys.argv = ["checker.py", *_texts]
exec(compile({checker!r}, "checker.py", "exec"), {{"__name__": "__main__"}})
"""
"""Runs a checker as ``python checker.py input.txt correct_output.txt solution_output.txt``; it prints 1 for a
right output (as open-r1/codeforces). Programs have no files, so ``open`` reads stdin here."""


def judge(program: str, tests: CodeTests, limits: Limits, sandbox: Sandbox) -> Item:
    """Return ``verdict`` (``passed`` only if every test passes, ``wrong_answer``, or an Execution's status),
    ``detail`` (the first failing test or "") and ``seconds``."""
    seconds = 0.0
    for number in range(len(tests.inputs)):
        # The first test that fails decides; later ones are not run.
        ended = sandbox.run(program, tests.stdin(number), limits, tests.function, tests.rules)
        seconds += ended.seconds
        verdict, why = ended.status, ended.error
        if verdict == "finished" and tests.checker is not None:
            # Several outputs are right: the problem's own checker reads input, expected and found output.
            texts = json.dumps([tests.inputs[number], tests.outputs[number], ended.stdout])
            check = sandbox.run(CHECK.format(checker=tests.checker), texts, limits, None, "plain")
            seconds += check.seconds
            if check.status != "finished" or check.stdout.strip() != "1":
                verdict = "wrong_answer"
                why = f"the checker, {check.status}: {check.error or check.stdout!r:.150}"
        elif verdict == "finished" and not tests.is_right(number, ended.stdout, ended.result):
            output = ended.stdout if tests.function is None else ended.result
            shown = None if output is None else output[:150]
            verdict, why = "wrong_answer", f"expected {tests.outputs[number]!r:.150}, found {shown!r:.150}"
        # One line, of which the end is kept: the error's message stands there.
        if verdict != "finished":
            line = " ".join(f"test {number + 1} of {len(tests.inputs)}: {why}".split())
            detail = line if len(line) <= LONGEST_DETAIL else "..." + line[-LONGEST_DETAIL:]
            return {"verdict": verdict, "detail": detail, "seconds": seconds}
    return {"verdict": "passed", "detail": "", "seconds": seconds}


def make_handler(isolation: dict[str, bool], python: str | None = None) -> Callable[[Item], Item]:
    """Return a handler of ``{"program", "tests", "limits"}``: ``judge``, or an Execution without tests."""
    sandbox = Sandbox(Isolation(**isolation), python)

    def handle(item: Item) -> Item:
        limits = Limits(**item["limits"])
        if "tests" not in item:
            return asdict(sandbox.run(item["program"], item["stdin"], limits, item.get("function")))
        return judge(item["program"], parse_tests(item["tests"]), limits, sandbox)

    return handle
