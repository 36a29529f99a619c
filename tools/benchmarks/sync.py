"""Weight syncs of a random Qwen3: into the engine in this process, and into servers on this machine.

The first measures vLLM's own reload; the additional time of servers is the transfer. ``--replicas``
servers get the same weights at once, each split over ``--tensor-parallel`` workers of this node.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from megatron_eqlen.metrics import ENGINE_SYNC_SECONDS
from megatron_eqlen.objectives.recipes import parse
from megatron_eqlen.recipe import Recipe
from megatron_eqlen.rollout.engine import Engine
from megatron_eqlen.rollout.vllm.client import ServerEngine
from tools.benchmarks.servers import running
from tools.benchmarks.table import show

LAYER_BYTES = 2 * 63e6
"""Bytes of a bfloat16 layer of the model below."""
MAX_LEN = 128


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--tensor-parallel", type=int, default=1, help="workers of a server")
    parser.add_argument("--repeat", type=int, default=3, help="medians of so many syncs count")
    parser.add_argument("--json", type=Path)


def run(args: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder), args.gigabytes)
        weights = load_file(model / "model.safetensors")
        results = [measure("in this process", colocated(model), weights, args.repeat)]
        workers = args.tensor_parallel
        with running(make_recipe(model, [], workers), max(args.replicas)) as servers:
            for count in args.replicas:
                recipe = make_recipe(model, list(servers)[:count], workers)
                engine = ServerEngine(model, recipe.rollout, [1], MAX_LEN, syncs_first=True)
                what = f"{count} server(s) of {workers}"
                results.append(measure(what, engine, weights, args.repeat))
    size = sum(weight.nbytes for weight in weights.values()) / 1e9
    show(results, f"{size:.2f} GB bfloat16, {torch.get_num_threads()} thread(s)", args.json)


def make_model(folder: Path, gigabytes: float) -> Path:
    """Make layers of Qwen3-1.7B with a small vocabulary, as many as make up the size."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=96, hidden_size=2048, intermediate_size=8192, max_position_embeddings=512,
        num_hidden_layers=max(1, round(gigabytes * 1e9 / LAYER_BYTES)), num_attention_heads=16,
        num_key_value_heads=8, head_dim=128, tie_word_embeddings=False, pad_token_id=None,
    )  # fmt: skip
    Qwen3ForCausalLM(config).bfloat16().save_pretrained(folder, max_shard_size="1TB")
    return folder


def make_recipe(model: Path, urls: list[str], workers: int = 1) -> Recipe:
    engine = {"tensor_parallel": workers} | ({"engine": "server", "servers": urls} if urls else {})
    return parse(
        {
            "name": "bench", "steps": 1, "model": {"path": str(model)},
            "data": {"sources": [{"name": "none", "path": "none"}], "max_prompt_length": MAX_LEN // 2},
            "rollout": {"max_response_length": MAX_LEN // 2, "max_num_seqs": 8, "kv_cache_gib": 0.1} | engine,
            "cluster": {"processes_per_node": workers},
        },
        "bench sync",
    )  # fmt: skip


def colocated(model: Path) -> Engine:
    from megatron_eqlen.rollout.vllm.engine.colocated import ColocatedEngine

    return ColocatedEngine(model, make_recipe(model, []).rollout, "bfloat16", [1], MAX_LEN)


def measure(name: str, engine: Engine, weights: dict[str, Tensor], repeat: int) -> dict[str, Any]:
    """Return medians of ``repeat`` syncs after a warm-up."""
    seconds, processor = [], []
    for version in range(1, repeat + 2):
        before = time.process_time()
        engine.update_weights(iter(weights.items()), version)
        processor.append(time.process_time() - before)
        seconds.append(engine.metrics()[ENGINE_SYNC_SECONDS])
    engine.close()
    took = statistics.median(seconds[1:])
    size = sum(weight.nbytes for weight in weights.values()) / 1e9
    return {
        "into": name,
        "seconds": took,
        "GB/s": size / took,
        "trainer's CPU seconds": statistics.median(processor[1:]),
    }
