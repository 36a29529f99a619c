"""Graders, for this trainer and for others: ``grade_math`` and ``grade_program`` import nothing that trains.

Both keep their worker processes for the calling process; the first call takes a second.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from functools import cache
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_eqlen.graders.grader import Grader
    from megatron_eqlen.types import Grade

WORKERS, SECONDS = 2, 6.0
CODE: Any = SimpleNamespace(
    workers=WORKERS, code_timeout=SECONDS, code_memory_mb=1024, code_sandbox="strict", code_python="3.11"
)
"""Settings of programs, as a recipe's section ``reward``: recipes need pydantic."""


def grade_math(response: str, gold: str | float) -> Grade:
    r"""Return the grade of the last ``\boxed{}`` of a response against ``gold`` (LaTeX or text)."""
    if not isinstance(gold, str | int | float):
        raise TypeError(f"gold: expected a text or a number, found {gold!r:.100}")
    return _grader("math", os.getpid()).grade([response], [str(gold)])[0]


def grade_program(response: str, tests: str | Mapping[str, Any]) -> Grade:
    """Return the grade of a response's last fenced block, run against ``tests`` (see ``code/tests.py``)."""
    given = tests if isinstance(tests, str) else json.dumps(dict(tests))
    return _grader("code", os.getpid()).grade([response], [given])[0]


@cache
def _grader(name: str, process: int) -> Grader:
    """Return the grader of this process: a forked one must not use its parent's workers."""
    if name == "math":
        from megatron_eqlen.graders.math.grader import MathGrader

        return MathGrader(WORKERS, SECONDS)
    from megatron_eqlen.graders.code.grader import CodeGrader

    return CodeGrader(CODE)
