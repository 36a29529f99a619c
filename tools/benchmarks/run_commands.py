"""Costs of the commands that read a run: 500 steps with metrics and evaluations, two of them recorded."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from megatron_eqlen.evaluation.result import Answers, EvaluationResult, write_results
from megatron_eqlen.files import step_name
from megatron_eqlen.recipe import Recipe
from megatron_eqlen.recipe.load import dump
from megatron_eqlen.rollout.record.recorder import FILES, record
from megatron_eqlen.types import Rollout

STEPS = 500
METRICS = 150
EVALUATED_EVERY = 50
SAMPLES = 32
COMMAND = """
import sys, time
from pathlib import Path
from megatron_eqlen.cli.__main__ import main
assert main(sys.argv[1:]) == 0
lines = Path("/proc/self/status").read_text().splitlines()
print(time.process_time(), *(line.split()[1] for line in lines if line.startswith("VmHWM")), file=sys.stderr)
"""
"""Reports its own cost: the kernel's maximum of a child counts its parent's memory, too."""
PROBLEMS = {"aime25": 30, "hmmt25": 30, "livecodebench_v6": 175}


def measure(folder: Path, rollouts: Sequence[Rollout], recipe: Recipe, tokens: int) -> list[dict[str, Any]]:
    """Return processor seconds and peak memory of each command, its imports included, for recorded steps of
    ``tokens`` tokens: ``rollouts`` again and again, of other prompts."""
    runs = [folder / f"seed-{seed}" for seed in range(2)]
    for seed, run in enumerate(runs):
        write_run(run, recipe.model_copy(update={"seed": seed}))
    record_steps(runs[0] / "streams", rollouts, tokens)
    return [
        cost("report", runs[0]),
        cost("inspect", runs[0] / "streams", "--model", recipe.model.path),
        cost("compare", folder),
    ]


def write_run(run: Path, recipe: Recipe) -> None:
    """Write a run that has ended, without its streams."""
    run.mkdir(parents=True)
    (run / "recipe.yaml").write_text(dump(recipe), encoding="utf-8")
    random = np.random.default_rng(recipe.seed)
    names = ["reward/mean", "time/harvest", "time/train", "time/step"]
    names += [f"group/{number}" for number in range(METRICS - len(names))]
    with (run / "metrics.jsonl").open("w", encoding="utf-8") as file:
        for step in range(1, STEPS + 1):
            values = dict(zip(names, random.random(len(names)).tolist(), strict=True))
            file.write(json.dumps({"step": step, "time": step} | values) + "\n")
    between = [step_name(step) for step in range(EVALUATED_EVERY, STEPS, EVALUATED_EVERY)]
    for label in ("before", *between, "after"):
        results = [evaluation(name, count, random) for name, count in PROBLEMS.items()]
        write_results(run / "evaluation" / f"{label}.json", results)


def evaluation(benchmark: str, problems: int, random: np.random.Generator) -> EvaluationResult:
    answers = [
        Answers(f"{benchmark}/{number}", right.tolist(), ["correct"] * SAMPLES, [9000] * SAMPLES)
        for number, right in enumerate(random.integers(0, 2, (problems, SAMPLES)).astype(float))
    ]
    return EvaluationResult(benchmark, answers, {"question_ids": [answer.prompt_id for answer in answers]})


def record_steps(streams: Path, rollouts: Sequence[Rollout], tokens: int) -> None:
    """Record the first and the last step, in files of as many tokens as ``rollouts`` have."""
    first, last = (streams / step_name(step) for step in (0, STEPS - 1))
    size = sum(len(segment) for rollout in rollouts for segment in rollout.segments())
    for copy in range(max(1, round(tokens / size))):
        others = [
            replace(rollout, prompt=replace(rollout.prompt, prompt_id=f"{copy}/{rollout.prompt_id}"))
            for rollout in rollouts
        ]
        record(first / FILES.replace("*", str(copy)), others)
    shutil.copytree(first, last, copy_function=os.link)


def cost(command: str, *arguments: str | Path) -> dict[str, Any]:
    line = [sys.executable, "-c", COMMAND, command, *map(str, arguments)]
    done = subprocess.run(line, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=True)
    seconds, kilobytes = map(float, done.stderr.splitlines()[-1].split())
    return {"command": f"eqlen {command}", "processor s": seconds, "peak MB": kilobytes / 1e3}
