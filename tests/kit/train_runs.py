"""Helpers of the tests of `eqlen train`: a run by command, and readers of its folder."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

import tests.kit.rollouts as kit
from megatron_eqlen.record.reader import read_step
from tests.kit.jobs import run
from tests.kit.processes import within
from tools.make_search import write_rows

STEPS = 3
GRADER = "tests.kit.rubrics:even_length"
NO_EVALUATION = "evaluation.benchmarks=[]"


def make_home(folder: Path, run: Callable[..., Any] = run) -> Path:
    """Fill ``folder`` with a random tiny model, its data and a recipe. ``run``: as ``jobs.run``."""
    data = folder / "sums.parquet"
    write_rows(data, [sum_of(first, second) for first in range(1, 9) for second in range(1, 9)])
    model = ["--out", folder / "base", "--steps", "0", "--processes", "1"]
    run("tools/make_tiny_model.py", "--data", data, *model)
    rows = [{"question": f"Compute ${n}+1$.", "answer": str(n + 1)} for n in range(40)]
    (folder / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "recipe.yaml").write_text(
        f"""
name: test
steps: {STEPS}
group_size: 4
model: {{path: {folder}/base, dtype: float32}}
data:
  prompts_per_step: 4
  max_prompt_length: 48
  instruction_role: none
  sources: [{{name: questions, reader: jsonl, path: {folder}/questions.jsonl, grader: {GRADER}}}]
reward: {{workers: 1}}
rollout:
  {{temperature: 1.0, top_p: 1.0, top_k: 0, max_response_length: 40, max_num_seqs: 32, kv_cache_gib: 0.02}}
optimizer: {{lr: 1e-3, warmup_steps: 0}}
packing: {{max_tokens_per_row: 512}}
checkpoint: {{every: 1, keep: 2}}
evaluation:
  samples: 2
  benchmarks: [{{name: questions, reader: jsonl, path: {folder}/questions.jsonl, limit: 4, grader: {GRADER}}}]
cluster: {{device: cpu}}
"""
    )
    return folder


def sum_of(first: int, second: int) -> dict[str, Any]:
    """Return a row of DeepMath-103K's schema; its demonstrations are the tokenizer's corpus."""
    work = f"{first}+{second}={first + second}"
    solutions = (
        f"\\boxed{{{first + second}}}",
        f"{work}\n\\boxed{{{first + second}}}",
        f"{work}\nCheck:\n{first + second}-{second}={first}",
    )
    return {
        "question": f"Compute ${first}+{second}$.", "final_answer": str(first + second), "difficulty": 1.0,
        "topic": "sums", **{f"r1_solution_{n}": text for n, text in enumerate(solutions, 1)},
    }  # fmt: skip


def train(home: Path, name: str, *arguments: str, ranks: int = 1, **environ: str) -> Path:
    processes = f"cluster.processes_per_node={ranks}"
    run(*command(home, name, processes, *arguments), ranks=ranks, **environ)
    return home / name


def command(home: Path, name: str, *arguments: str) -> list:
    return ["-m", "megatron_eqlen.cli", "train", home / "recipe.yaml", f"run_dir={home / name}", *arguments]


def metrics(run_folder: Path) -> list[dict]:
    return [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]


def column(run_folder: Path, name: str) -> list[float]:
    return [record[name] for record in metrics(run_folder)]


def streams_that_teach_little(trained: Path, folder: Path, spoil_of: dict[int, Callable]) -> Path:
    """Return a copy of the run's record with the rollouts of some steps, counted from 0, spoiled."""
    shutil.copytree(trained / "streams", folder)
    for step, spoil in spoil_of.items():
        path = folder / f"step-{step:08d}/rank-0.arrow"
        rollouts = read_step(path.parent)
        path.unlink()
        path.with_name("grades-rank-0.arrow").unlink()
        for rollout in rollouts:
            spoil(rollout)
        kit.record(path, rollouts)
    return folder


def no_reward(rollout) -> None:
    for segment, _ in rollout.ended():
        segment.grade.reward = 0.0


def nan_logprob(rollout) -> None:
    for segment in rollout.parts:
        logprobs = segment.tokens["logprobs"].copy()
        logprobs[0] = math.nan
        segment.tokens = segment.tokens.with_column("logprobs", logprobs)


def same_weights(run_folder: Path, other: Path) -> bool:
    """Return True if two runs have exported the same bits."""
    weights = [load_file(folder / "export/model.safetensors") for folder in (run_folder, other)]
    return all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def checkpoints(run_folder: Path) -> list[str]:
    return [path.name[-1] for path in sorted((run_folder / "checkpoints").glob("step-*"))]


def wait_for_steps(folder: Path, count: int, *processes: Any) -> None:
    """Wait until the metrics hold that many steps."""

    def there() -> bool:
        ended = [process for process in processes if process.poll() is not None]
        assert not ended, f"it ended before its time: {[(job.poll(), job.stderr[-4000:]) for job in ended]}"
        file = folder / "metrics.jsonl"  # whose last line may be half written
        return file.exists() and file.read_bytes().count(b"\n") >= count

    assert within(300, there)
