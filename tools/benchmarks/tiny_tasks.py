"""Tiny models with data and a recipe, made in a minute, for training benchmarks."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_eqlen.files import write_text

ROOT = Path(__file__).parents[2]


def random_model(home: Path) -> Path:
    """Make a random tiny model; return its recipe."""
    make("make_arithmetic.py", "--out", home / "data", "--train", 400, "--test", 4)
    train = home / "data/train.parquet"
    make("make_tiny_model.py", "--data", train, "--out", home / "base", "--steps", 0, "--processes", 1)
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
reward: {{rubric: "tools.benchmarks.tiny_tasks:even_length", workers: 1}}
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


def half_warmed(home: Path) -> Path:
    """Make a model of chains of sums and its data; return the quickstart's recipe for them."""
    make("make_arithmetic.py", "--out", home / "data")
    make("make_tiny_model.py", "--data", home / "data/train.parquet", "--out", home / "base")
    write_text(
        home / "recipe.yaml",
        f"""
extends: {ROOT}/recipes/tiny_cpu.yaml
name: overlap
model: {{path: {home}/base}}
data:
  sources: [{{name: arithmetic, reader: deepmath, path: {home}/data/train.parquet}}]
rollout: {{max_response_length: 192}}
loss: {{rollout_is: token}}
checkpoint: {{every: 1000}}
report: {{keep_streams: 1}}
evaluation:
  benchmarks: [{{name: arithmetic, reader: deepmath, path: {home}/data/test.parquet, limit: 64}}]
""",
    )
    return home / "recipe.yaml"


TASKS: dict[str, Callable[[Path], Path]] = {"even": random_model, "arithmetic": half_warmed}


def make(script: str, *arguments: Any) -> None:
    subprocess.run([sys.executable, ROOT / "tools" / script, *map(str, arguments)], check=True, cwd=ROOT)


def even_length(question: str, response: str, gold: str) -> float:
    """Return 1 for a response with an even number of characters."""
    return float(len(response) % 2 == 0)
