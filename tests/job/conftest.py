"""A tiny model with its data and a recipe, and a run of it that has ended: once for all jobs of a worker."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit import ROOT
from tests.kit.jobs import run
from tests.kit.train_runs import STEPS, train
from tools.benchmarks import servers


@pytest.fixture(scope="session")
def home(tmp_path_factory) -> Path:
    """A folder with a random tiny model, its data and a recipe."""
    folder = tmp_path_factory.mktemp("train")
    run("tools/make_arithmetic.py", "--out", folder / "data", "--train", "60", "--test", "4")
    data = folder / "data/train.parquet"
    model = ["--out", folder / "base", "--steps", "0", "--processes", "1"]
    run("tools/make_tiny_model.py", "--data", data, *model)
    rows = [{"question": f"Compute ${n}+1$.", "answer": str(n + 1), "grader": "rubric"} for n in range(40)]
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
  sources: [{{name: questions, reader: jsonl, path: {folder}/questions.jsonl}}]
reward: {{rubric: "tests.kit.rubrics:even_length", workers: 1}}
rollout:
  {{temperature: 1.0, top_p: 1.0, top_k: 0, max_response_length: 80, max_num_seqs: 32, kv_cache_gib: 0.2}}
optimizer: {{lr: 1e-3, warmup_steps: 0}}
packing: {{max_tokens_per_row: 512}}
checkpoint: {{every: 1, keep: 2}}
evaluation:
  samples: 2
  benchmarks: [{{name: questions, reader: jsonl, path: {folder}/questions.jsonl, limit: 4}}]
"""
    )
    return folder


@pytest.fixture(scope="session")
def served(home) -> Iterator[list[str]]:
    """What a recipe needs to use a server that runs, started as a user starts it."""
    port = str(*servers.free_ports(1))
    module = ["-m", "megatron_eqlen.rollout.vllm.server", home / "recipe.yaml", "--port", port]
    server = servers.start([sys.executable, *module], {"OMP_NUM_THREADS": "1"}, cwd=ROOT)
    try:
        servers.wait_until_up(f"http://127.0.0.1:{port}", server)
        yield ["rollout.engine=server", f"rollout.servers=[http://127.0.0.1:{port}]"]
    finally:
        servers.stop(server)


@pytest.fixture(scope="session")
def trained(home) -> Path:
    """A finished run on one rank."""
    return train(home, "one")
