"""The math grader's speed, in answers a second.

``grouped`` has 16 samples a prompt, which share answers; ``distinct`` has none to share.

Agreement: tests/tables/math_answers.jsonl holds answers with a person's verdict. The table counts how often
each rule agrees with it, and plain math-verify, used on the whole response as its documentation shows.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from megatron_eqlen.rewards.math.grader import MathGrader, MathRule
from tools.benchmarks.table import show

ANSWER_TABLE = Path(__file__).resolve().parents[2] / "tests" / "tables" / "math_answers.jsonl"
SAMPLES_PER_PROMPT = 16
ANSWERS_PER_PROMPT = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--answers", type=int, default=4096)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--json", type=Path)


def run(args: argparse.Namespace) -> None:
    show_agreement(read_answer_table(), args.workers)
    results = [
        measure("grouped", args.workers, *draw_answers(args.answers, SAMPLES_PER_PROMPT)),
        measure("distinct", args.workers, *draw_answers(args.answers, 1)),
    ]
    show(results, f"math grader, {args.workers} workers", args.json)


@dataclass(frozen=True)
class AnswerCase:
    """A response and a person's verdict on it."""

    gold: str
    response: str
    right: bool
    remark: str


def read_answer_table() -> list[AnswerCase]:
    return [AnswerCase(**json.loads(line)) for line in ANSWER_TABLE.read_text(encoding="utf-8").splitlines()]


def show_agreement(cases: list[AnswerCase], workers: int) -> None:
    judges = {}
    for rule in get_args(MathRule):
        grader = MathGrader(rule, workers)
        grades = grader.grade([case.response for case in cases], [case.gold for case in cases])
        grader.close()
        judges[grader.name] = [grade.reward == 1.0 for grade in grades]
    judges["plain math_verify"] = [plain_math_verify(case.gold, case.response) for case in cases]
    show([_agreement(name, cases, judged) for name, judged in judges.items()], f"{len(cases)} answers", None)


def _agreement(name: str, cases: list[AnswerCase], judged: list[bool]) -> dict[str, Any]:
    pairs = list(zip((case.right for case in cases), judged, strict=True))
    return {
        "grader": name,
        "agrees": sum(right == said for right, said in pairs) / len(pairs),
        "wrong called right": sum(said and not right for right, said in pairs),
        "right called wrong": sum(right and not said for right, said in pairs),
    }


def plain_math_verify(gold: str, response: str) -> bool:
    """Use math-verify as its documentation shows it; its own timers bound it."""
    from math_verify import parse, verify

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # it warns of its timeouts
    return bool(verify(parse(f"${gold}$"), parse(response)))


def measure(name: str, workers: int, texts: list[str], golds: list[str]) -> dict[str, Any]:
    """Return answers a second, of warm workers."""
    grader = MathGrader("either", workers)
    grader.grade(texts[:1], golds[:1])
    wall, own = time.perf_counter(), time.process_time()
    grades = grader.grade(texts, golds)
    wall, own = time.perf_counter() - wall, time.process_time() - own
    grader.close()
    return {
        "what": name,
        "answers": len(texts),
        "right": sum(grade.reward for grade in grades) / len(texts),
        "answers/s": len(texts) / wall,
        "ms CPU in trainer": 1000 * own / len(texts),
    }


def draw_answers(count: int, samples: int) -> tuple[list[str], list[str]]:
    """Return responses and golds. ``samples`` responses share a gold and a few answers."""
    rng = random.Random(0)
    texts, golds = [], []
    for _ in range(count // samples):
        gold = draw_gold(rng)
        answers = [draw_answer(rng, gold) for _ in range(ANSWERS_PER_PROMPT)]
        golds += [gold] * samples
        texts += ["so " * 1000 + rf"\boxed{{{rng.choice(answers)}}}" for _ in range(samples)]
    return texts, golds


def draw_gold(rng: random.Random) -> str:
    i, j = rng.randint(1, 999), rng.randint(2, 99)
    kinds = [str(i), str(i), rf"\frac{{{i}}}{{{j}}}", rf"{i}\sqrt{{{j}}}", f"x^2+{i}x-{j}", f"({i},{j})"]
    return rng.choice([*kinds, f"e^{{{j}}}", rf"\frac{{\pi}}{{{j}}}", "Yes", rf"\ln {j}"])


def draw_answer(rng: random.Random, gold: str) -> str:
    written_otherwise = [gold.replace(r"\frac", r"\dfrac"), gold + r"\text{ cm}"]
    return rng.choice([gold, gold, gold, *written_otherwise, *(draw_gold(rng) for _ in range(3))])
