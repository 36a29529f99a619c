"""Grading beside generation: the wait of a step when its harvest ends, and the cost of decoding.

A simulated harvest: a driver whose decode step leaves the processor idle for ``STEP`` seconds (an accelerator
is at work), and responses of ``CHARACTERS`` that end one after another. *after*: all are scored when it is
over. *beside*: each is begun when it ends.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron_eqlen.hf.tokenizer import HuggingFaceTokenizer
from megatron_eqlen.recipe import RewardRecipe
from megatron_eqlen.rewards.code.tests import CodeTests
from megatron_eqlen.rewards.grader import END_OF_THINKING
from megatron_eqlen.rewards.math.grader import LONGEST_TAIL
from megatron_eqlen.rewards.scoring import Scorer
from megatron_eqlen.tokens import Tokens
from megatron_eqlen.toys.tokenizer_maker import write_hf_tokenizer
from megatron_eqlen.types import Group, Prompt, Segment
from tools.benchmarks.table import show

CHARACTERS = 90_000
STEP = 0.02
THOUGHT = "so we let x = 12 and then the sum of all terms is 3 + 4 x, but wait, the number of ways is 720; "
PROGRAM = "import json\nprint(sum(map(int, input().split())) + {} * 0)\n"
LOOP = "while True:\n    pass\n"
TESTS = CodeTests(["2 3\n"], ["5\n"], time_limit=2.0).to_json()


def run(args: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        write_hf_tokenizer(Path(folder), [THOUGHT, PROGRAM] * 20, vocab_size=600)
        tokenizer = HuggingFaceTokenizer(Path(folder))
    show(measure_decoding(tokenizer), f"decoding a response of {CHARACTERS // 1000} KB", None)
    makers = {"math": draw_math, "programs": draw_program}
    counts = {"math": args.responses, "programs": args.responses // 8}
    results = [
        measure(name, beside, [makers[name](number) for number in range(counts[name])], tokenizer, args)
        for name in makers
        for beside in (False, True)
    ]
    show(results, f"a harvest of {args.seconds:g} s, {args.workers} workers", None)


def measure_decoding(tokenizer: HuggingFaceTokenizer) -> list[dict[str, Any]]:
    """Measure processor time of the library and of our decoder: whole, and the part that the math grader
    reads."""
    thought = THOUGHT * (CHARACTERS // len(THOUGHT))
    answered = thought + END_OF_THINKING + THOUGHT * 15 + r"\boxed{5}"
    ways: dict[str, Callable[[np.ndarray], str]] = {
        "library, whole": lambda ids: tokenizer._decode(ids.tolist()),
        "whole": tokenizer.decode,
        "end": lambda ids: tokenizer.decode_end(ids, END_OF_THINKING, LONGEST_TAIL),
    }
    results = []
    for name, text in {"answer after thinking": answered, "without </think>": thought}.items():
        ids = np.array(tokenizer.encode(text), np.int32)
        costs = {f"{way}, ms": _milliseconds(decode, ids) for way, decode in ways.items()}
        results.append({"response": name, "tokens": len(ids)} | costs)
    return results


def _milliseconds(decode: Callable[[np.ndarray], str], ids: np.ndarray) -> float:
    decode(ids)
    started = time.process_time()
    for _ in range(20):
        decode(ids)
    return 1000 * (time.process_time() - started) / 20


def draw_math(number: int) -> tuple[str, str, str]:
    """Return (grader, gold, answer): the answer is another way to write the gold, or wrong."""
    rng = random.Random(number)
    gold = rf"\frac{{{number + 1}}}{{{number + 2}}}"
    return "math", gold, rf"\boxed{{{rng.choice([number + 1, number + 3])}/{number + 2}}}"


def draw_program(number: int) -> tuple[str, str, str]:
    """Return a program; one in 16 never ends."""
    program = LOOP + f"# {number}\n" if number % 16 == 15 else PROGRAM.format(number)
    return "code", TESTS, f"\n```python\n{program}```\n"


def measure(
    name: str,
    beside: bool,
    problems: Sequence[tuple[str, str, str]],
    tokenizer: HuggingFaceTokenizer,
    args: argparse.Namespace,
) -> dict[str, Any]:
    thought = THOUGHT * (CHARACTERS // len(THOUGHT)) + END_OF_THINKING
    groups = [
        _group(number, grader, gold, tokenizer.encode(thought + answer), min(tokenizer.eos_token_ids))
        for number, (grader, gold, answer) in enumerate(problems)
    ]
    scorer = Scorer(RewardRecipe(workers=args.workers), tokenizer)
    scorer.score([groups.pop(0)])  # processes start
    seconds = drive(groups, args.seconds, scorer if beside else None)
    started = time.perf_counter()
    metrics = scorer.score(groups)
    waited = time.perf_counter() - started
    scorer.close()
    return {
        "what": name,
        "graded": "beside" if beside else "after",
        "responses": len(groups),
        "right": metrics["reward/mean"],
        "harvest s": seconds,
        "then score s": waited,
        "grader s": metrics["reward/grader_seconds"],
        "of it hidden s": metrics["reward/hidden_seconds"],
        "responses/s": len(groups) / (seconds + waited),
    }


def _group(number: int, grader: str, gold: str, tokens: list[int], end: int) -> Group:
    prompt = Prompt(f"q{number}", [1], "?", grader, gold, number=number)
    return Group(prompt, 0, [Segment(Tokens.of([*tokens, end], [0.0] * (len(tokens) + 1)), "stop")])


def drive(groups: Sequence[Group], seconds: float, scorer: Scorer | None) -> float:
    """Run the harvest; return its duration. Responses end evenly over it."""
    steps, begun, started = int(seconds / STEP), 0, time.perf_counter()
    for step in range(1, steps + 1):
        time.sleep(STEP)
        while begun < len(groups) * step // steps:
            if scorer is not None:
                (completion,) = groups[begun].completions
                scorer.begin(groups[begun].prompt, completion.token_ids)
            begun += 1
    return time.perf_counter() - started
