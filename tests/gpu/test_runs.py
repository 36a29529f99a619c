"""Runs of ``eqlen train`` on one GPU: harvest, sync, sleep, parking, resume, with vLLM in the trainer's
process and on a server."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_eqlen.engines.server.gate import KEY
from tests.kit import ROOT
from tests.kit.servers import free_ports, wait_until_up
from tests.kit.tiny_models import save_tiny
from tests.kit.train_runs import NO_EVALUATION, column, make_home, metrics

ON = f"cluster.device={'gpu' if torch.cuda.is_available() else 'cpu'}"
SHARE = "rollout.gpu_memory_utilization=0.4"
BFLOAT16 = (
    "model.dtype=bfloat16", NO_EVALUATION, "rollout.kv_cache_gib=0.5", SHARE, "loss.kl_coef=0.002",
)  # fmt: skip
"""Keys; with a KL penalty rollouts of equal rewards train, too."""
MISMATCH = "mismatch/logprob_abs_diff"
LARGER: dict[str, Any] = {
    "vocab_size": 384,
    "hidden_size": 256,
    "head_dim": 64,
    "max_position_embeddings": 1024,
}
EXPERTS: dict[str, Any] = {"num_experts": 8, "moe_intermediate_size": 128}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3_moe": LARGER | EXPERTS | {"num_hidden_layers": 2},
    "qwen3_next": LARGER | EXPERTS | {
        "shared_expert_intermediate_size": 128, "full_attention_interval": 4, "linear_num_key_heads": 2,
        "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    },
}  # fmt: skip
"""Sizes that vLLM's kernels take."""


def command(*arguments: Any) -> subprocess.CompletedProcess[str]:
    """Run a command in a process of its own."""
    line = [sys.executable, *map(str, arguments)]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-8000:]
    return done


def train(home: Path, name: str, *overrides: str) -> Path:
    """Train in ``home / name``; the same call resumes."""
    overrides = (f"run_dir={home / name}", ON, *overrides)
    command("-m", "megatron_eqlen.cli", "train", home / "recipe.yaml", *overrides)
    return home / name


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    return make_home(tmp_path_factory.mktemp("home"), run=command)


def model(home: Path, family: str) -> str:
    """Save a random model of ``family`` with the tokenizer of ``home``'s; return the key that names it."""
    folder, base = home / family, home / "base"
    save_tiny(folder, family, **MODELS[family])
    for name in ("chat_template.jinja", "tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(base / name, folder)
    config, ends = (json.loads((place / "config.json").read_text()) for place in (folder, base))
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": ends["eos_token_id"]}))
    return f"model.path={folder}"


def test_trainer_and_engine_agree_and_take_turns_in_the_gpus_memory_and_a_run_resumes(home):
    keys = (*BFLOAT16, "rollout.park_trainer=all")
    train(home, "turns", *keys, "steps=2")
    turns = train(home, "turns", *keys, "steps=3")
    assert [record["step"] for record in metrics(turns)] == [1, 2, 3]
    assert max(column(turns, MISMATCH)) < 0.02
    assert all((turns / "export").glob("*.safetensors"))


def test_in_float32_trainer_and_engine_agree_to_rounding(home, monkeypatch):
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")  # Transformer Engine multiplies in TF32 by default
    monkeypatch.setenv("TRITON_F32_DEFAULT", "ieee")  # and vLLM's attention, which is Triton's in float32
    assert max(column(train(home, "float32", SHARE, "steps=2"), MISMATCH)) < 1e-3


def test_the_trainer_computes_the_masked_distribution_that_the_engine_sampled(home):
    kept = ("rollout.keep_sampling_mask=true", "rollout.top_k=20", "rollout.top_p=0.95", "rollout.min_p=0.02")
    assert max(column(train(home, "masks", *BFLOAT16, *kept, "steps=2"), MISMATCH)) < 0.02


@pytest.mark.parametrize("family", MODELS)
def test_models_of_experts_and_of_gated_delta_net_are_trained_and_synced(home, family):
    """With the engine's routes: a router may choose otherwise where two experts are equally good."""
    keys = (model(home, family), "rollout.keep_routes=true", "sampling=independent")
    run = train(home, family, *BFLOAT16, *keys, "steps=2")
    assert max(column(run, MISMATCH)) < 0.1


def test_a_server_on_the_same_gpu_gets_the_weights_of_each_step(home, monkeypatch):
    monkeypatch.setenv(KEY, "the-secret-of-the-tests")
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    keys = (ON, *BFLOAT16, "rollout.engine=server", f"rollout.servers=[{url}]")
    line = ["-m", "megatron_eqlen.engines.server", home / "recipe.yaml", *keys, "--port", port]
    server = subprocess.Popen([sys.executable, *map(str, line)], cwd=ROOT)
    try:
        wait_until_up(url, server)
        assert max(column(train(home, "served", *keys, "steps=2"), MISMATCH)) < 0.02
    finally:
        server.terminate()
        server.wait(60)
