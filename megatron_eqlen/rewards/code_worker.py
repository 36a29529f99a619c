"""What runs inside a code grader's worker: judge programs in a sandbox of its own.

The worker knows the tests; the sandbox's zygote, forked before any arrives, does not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from megatron_eqlen.rewards.code_tests import CodeTests
from megatron_eqlen.rewards.judge import judge
from megatron_eqlen.rewards.program import Isolation, Limits
from megatron_eqlen.rewards.sandbox import Sandbox
from megatron_eqlen.rewards.sandbox_probe import probe


def make_handler(isolation: dict[str, bool] | None = None) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Answers ``{"program", "tests", "limits"}`` with a Judgement; without ``isolation``: what is
    offered.
    """
    if isolation is None:
        return lambda _: asdict(probe())
    sandbox = Sandbox(Isolation(**isolation))

    def handle(item: dict[str, Any]) -> dict[str, Any]:
        limits = Limits(**item["limits"])
        if "tests" not in item:
            return asdict(sandbox.run(item["program"], item["stdin"], limits, item.get("function")))
        return asdict(judge(item["program"], CodeTests.from_json(item["tests"]), limits, sandbox.run))

    return handle
