"""How often the math grader agrees with a person, and how many answers it grades a second.

tests/tables/math_answers.jsonl holds answers with a person's verdict. Plain math-verify is used on the whole
response, as its documentation shows.
"""

from __future__ import annotations

import argparse
import json
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_eqlen.graders.math.grader import MathGrader
from tools.benchmarks.table import show

ANSWER_TABLE = Path(__file__).resolve().parents[2] / "tests" / "tables" / "math_answers.jsonl"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workers", type=int, default=2)


@dataclass(frozen=True)
class AnswerCase:
    """A response and a person's verdict on it."""

    gold: str
    response: str
    right: bool
    remark: str


def read_answer_table() -> list[AnswerCase]:
    return [AnswerCase(**json.loads(line)) for line in ANSWER_TABLE.read_text(encoding="utf-8").splitlines()]


def run(args: argparse.Namespace) -> None:
    cases = read_answer_table()
    grader = MathGrader(args.workers)
    grader.grade([r"\boxed{2x}"], ["3"])  # starts the workers
    results = [measure(grader.name, cases, lambda: graded(grader, cases))]
    grader.close()
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # it warns of its timeouts
    results.append(measure("plain math_verify", cases, lambda: [plain_math_verify(case) for case in cases]))
    show(results, f"{len(cases)} answers, {args.workers} workers (math_verify: none)")


def graded(grader: MathGrader, cases: list[AnswerCase]) -> list[bool]:
    grades = grader.grade([case.response for case in cases], [case.gold for case in cases])
    return [grade.reward == 1.0 for grade in grades]


def plain_math_verify(case: AnswerCase) -> bool:
    """Use math-verify as its documentation shows it; its own timers bound it."""
    from math_verify import parse, verify

    return bool(verify(parse(f"${case.gold}$"), parse(case.response)))


def measure(name: str, cases: list[AnswerCase], judge: Callable[[], list[bool]]) -> dict[str, Any]:
    started = time.perf_counter()
    judged = judge()
    seconds = time.perf_counter() - started
    pairs = list(zip((case.right for case in cases), judged, strict=True))
    return {
        "grader": name,
        "agrees": sum(right == said for right, said in pairs) / len(pairs),
        "wrong called right": sum(said and not right for right, said in pairs),
        "right called wrong": sum(right and not said for right, said in pairs),
        "answers/s": len(cases) / seconds,
    }
