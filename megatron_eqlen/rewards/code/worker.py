"""A code grader's worker process: judges programs in a sandbox of its own.

The worker knows the tests; the sandbox's zygote, forked before any arrives, does not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from functools import lru_cache
from typing import Any

from megatron_eqlen.rewards.code.judge import judge, judge_as_livecodebench
from megatron_eqlen.rewards.code.tests import CodeTests
from megatron_eqlen.rewards.sandbox.client import Sandbox
from megatron_eqlen.rewards.sandbox.probe import probe
from megatron_eqlen.rewards.sandbox.program import Isolation, Limits


def make_handler(isolation: dict[str, bool] | None = None) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Return a handler that answers ``{"program", "tests", "limits"}`` with a Judgement. Without
    ``isolation`` it answers with the isolation that the machine offers."""
    if isolation is None:
        return lambda _: asdict(probe())
    sandbox = Sandbox(Isolation(**isolation))

    def handle(item: dict[str, Any]) -> dict[str, Any]:
        limits = Limits(**item["limits"])
        if "tests" not in item:
            return asdict(sandbox.run(item["program"], item["stdin"], limits, item.get("function")))
        tests = _parse_tests(item["tests"])
        strict = tests.livecodebench and item.get("lcb_strict", False)
        verdict_of = judge_as_livecodebench if strict else judge
        return asdict(verdict_of(item["program"], tests, limits, sandbox.run))

    return handle


@lru_cache(maxsize=16)
def _parse_tests(text: str) -> CodeTests:
    """Parse tests; cached, because the samples of a prompt come one after another."""
    return CodeTests.from_json(text)
