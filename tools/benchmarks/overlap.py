"""Steps an hour of real runs at ``rollout.staleness`` 0, 1, 2, ..., server and trainer on a core each.

Every run trains the same model on the same prompts with the same seed; what differs is how far ahead the
server generates. A run's time is from the end of its first step to the end of its last. With several
``--seeds`` a second table has the mean reward at the same wall time, with 95% intervals over the seeds. The
default is a random model with a reward for responses of even length; ``--recipe`` runs another one, whose
inputs must be there. ``--set`` changes keys of either: ``loss.epochs=2`` makes training longer against
generation, say.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron_eqlen.evaluation.statistics import t_quantile
from megatron_eqlen.metrics import (
    OBJECTIVE_EFFECTIVE_SAMPLES,
    REWARD_MEAN,
    TIME_ENGINE_IDLE,
    TIME_STEP,
    TIME_TRAINER_IDLE,
)
from megatron_eqlen.recipe_load import load
from megatron_eqlen.report.metrics import Records, read_metrics
from tools.benchmarks.servers import running
from tools.benchmarks.table import show

ROOT = Path(__file__).parents[2]
MOMENTS = 4
"""Wall times at which the reward is compared."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument(
        "--variants", nargs="+", default=[""], metavar="KEYS", help="comma-separated keys of runs"
    )
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--seeds", type=int, default=1, help="runs of each kind")
    parser.add_argument("--recipe", type=Path, help="default: a random model, made here")
    parser.add_argument(
        "--set", nargs="+", default=[], metavar="key=value", help="changes of every run's recipe"
    )
    parser.add_argument("--cores", type=int, nargs=2, default=[0, 1], help="of trainer and server")
    parser.add_argument("--json", type=Path)


def run(args: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        recipe = args.recipe or make_recipe(home)
        trainer, server = ({core} for core in args.cores)
        os.sched_setaffinity(0, server)  # processes inherit it
        fixed = [f"steps={args.steps}", "evaluation.every=0", "evaluation.benchmarks=[]", *args.set]
        with running(load(recipe, fixed), 1, OMP_NUM_THREADS="1") as servers:
            os.sched_setaffinity(0, trainer)
            fixed += ["rollout.engine=server", f"rollout.servers=[{','.join(servers)}]"]
            fixed += ["cluster.processes_per_node=1"]
            runs = {
                (staleness, variant): [
                    train(recipe, home / f"{staleness}-{variant}-{seed}", staleness, variant, seed, fixed)
                    for seed in range(args.seeds)
                ]
                for variant in args.variants
                for staleness in args.staleness
            }
    baseline = runs[args.staleness[0], args.variants[0]]
    results = [speed(*kind, records, baseline) for kind, records in runs.items()]
    show(results, f"{args.steps} steps, {args.seeds} seed(s), a core each for server and trainer", args.json)
    if args.seeds > 1:
        until = min(seconds(one) for of_kind in runs.values() for one in of_kind)
        moments = [until * (number + 1) / MOMENTS for number in range(MOMENTS)]
        show(
            [rewards(*kind, records, moments) for kind, records in runs.items()], "mean reward by then", None
        )


def train(
    recipe: Path, folder: Path, staleness: int, variant: str, seed: int, fixed: Sequence[str]
) -> Records:
    """The metrics of one run."""
    own = [
        f"run_dir={folder}",
        f"rollout.staleness={staleness}",
        f"seed={seed}",
        *filter(None, variant.split(",")),
    ]
    command = [sys.executable, "-m", "megatron_eqlen.cli", "train", recipe, *fixed, *own]
    environ = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    subprocess.run(command, env=environ, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return read_metrics(folder)


def seconds(records: Records) -> float:
    """From the end of the first step to that of the last."""
    return records[-1]["time"] - records[0]["time"]


def speed(staleness: int, variant: str, runs: list[Records], baseline: list[Records]) -> dict[str, Any]:
    def mean(name: str) -> float:
        return statistics.fmean(record.get(name) or 0.0 for one in runs for record in one[1:])

    hours = sum(map(seconds, runs)) / 3600
    steps = sum(len(one) - 1 for one in runs)
    first = 3600 * sum(len(one) - 1 for one in baseline) / sum(map(seconds, baseline))
    return {
        "staleness": staleness,
        "keys": variant or "-",
        "steps/h": steps / hours,
        "to the first": steps / hours / first,
        "effective/h": steps * mean(OBJECTIVE_EFFECTIVE_SAMPLES) / hours,
        "step s": mean(TIME_STEP),
        "harvest s": mean("time/harvest"),
        "train s": mean("time/train"),
        "sync s": mean("time/sync"),
        "engine idle s": mean(TIME_ENGINE_IDLE),
        "trainer idle s": mean(TIME_TRAINER_IDLE),
    }


def rewards(staleness: int, variant: str, runs: list[Records], moments: Sequence[float]) -> dict[str, Any]:
    """Of the step that had ended last at each moment, over the seeds."""
    row: dict[str, Any] = {"staleness": staleness, "keys": variant or "-"}
    for moment in moments:
        found = [
            [one[REWARD_MEAN] for one in records if one["time"] - records[0]["time"] <= moment][-1]
            for records in runs
        ]
        half = t_quantile(0.975, len(found) - 1) * np.std(found, ddof=1) / np.sqrt(len(found))
        row[f"at {moment:.0f} s"] = f"{np.mean(found):.3f} ±{half:.3f}"
    return row


def make_recipe(home: Path) -> Path:
    """A recipe for a random tiny model, which it makes."""
    for script, *arguments in (
        ("make_arithmetic.py", "--out", home / "data", "--train", "400", "--test", "4"),
        ("make_tiny_model.py", "--data", home / "data/train.parquet", "--out", home / "base", "--steps", "0",
         "--processes", "1"),
    ):  # fmt: skip
        subprocess.run([sys.executable, ROOT / "tools" / script, *map(str, arguments)], check=True, cwd=ROOT)
    rows = [{"question": f"Compute ${n}+1$.", "answer": str(n), "grader": "rubric"} for n in range(400)]
    (home / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (home / "recipe.yaml").write_text(
        f"""
name: overlap
steps: 1
group_size: 8
model: {{path: {home}/base, dtype: float32}}
data:
  prompts_per_step: 8
  max_prompt_length: 48
  instruction_role: none
  sources: [{{name: questions, reader: jsonl, path: {home}/questions.jsonl}}]
reward: {{rubric: "tools.benchmarks.overlap:even_length", workers: 1}}
rollout:
  {{temperature: 1.0, top_p: 1.0, top_k: 0, max_response_length: 400, max_num_seqs: 64, kv_cache_gib: 0.5}}
optimizer: {{lr: 1e-3, warmup_steps: 0}}
packing: {{max_tokens_per_row: 2048}}
loss: {{rollout_is: token}}
checkpoint: {{every: 1000}}
report: {{keep_streams: 1}}
"""
    )
    return home / "recipe.yaml"


def even_length(question: str, response: str, gold: str) -> float:
    """1 for a response with an even number of characters."""
    return float(len(response) % 2 == 0)
