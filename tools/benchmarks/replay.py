"""Router replay on an engine whose routers are perturbed: effects on experts, mismatch and reward.

A random Qwen3-MoE is trained in bfloat16 with EqLen-GRPO by the real loop. The engine gets every weight of
the trainer, but noise is added to its routers' weights, the same at every sync, so it chooses other experts
than the trainer's routers would. For each seed one run trains with the engine's experts
(``loss.router_replay``) and one with the trainer's. Rewards are of the engine's responses. The task needs
context: the share of neighbouring characters of which exactly one is a digit.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import multiprocessing
import os
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import pairwise
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from torch import Tensor

from megatron_eqlen.metrics import EXPERT_AGREEMENT, MISMATCH, REWARD_MEAN
from megatron_eqlen.report.metrics import read_metrics
from tools.benchmarks.table import show

FORK = multiprocessing.get_context("fork")
Found = dict[tuple[int, bool], list[dict[str, float]]]
"""Steps' metrics of each run, by seed and by whether it replays."""

ENDS = 24
"""Tokens that end a response: a random model ends one after vocabulary / ENDS tokens."""
ARMS = {"without replay": False, "with replay": True}
ROUTER_STD = 0.05
MODEL: dict[str, Any] = {
    "vocab_size": 304, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 96, "moe_intermediate_size": 64,
    "num_experts": 16, "num_experts_per_tok": 2, "norm_topk_prob": True, "decoder_sparse_step": 1,
    "mlp_only_layers": [], "max_position_embeddings": 512, "tie_word_embeddings": False, "pad_token_id": None,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}  # fmt: skip
T_95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 8: 2.365, 10: 2.262}
"""Student's t for a 95% interval, by the number of seeds."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seeds", type=int, default=5, choices=sorted(T_95))
    parser.add_argument("--steps", type=int, default=45)
    parser.add_argument("--noise", type=float, default=2.0, help="of the routers, in standard deviations")
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--jobs", type=int, default=1, help="runs at once, a core each")
    parser.add_argument("--out", type=Path, help="keep the run folders here, and go on from them")
    parser.add_argument("--json", type=Path)


def run(args: argparse.Namespace) -> None:
    os.environ |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        home = args.out or Path(temporary)
        pairs = [(seed, replay) for seed in range(args.seeds) for replay in ARMS.values()]
        for seed in range(args.seeds):
            make_model(home / f"model-{seed}", seed)
        importlib.import_module("megatron_eqlen.run.loop")  # each run is a fork that has imported all
        importlib.import_module("megatron_eqlen.rollout.vllm.engine.colocated")
        with ProcessPoolExecutor(args.jobs, FORK) as pool:
            runs = [pool.submit(in_a_fork, train, home, seed, replay, args) for seed, replay in pairs]
            found = {pair: future.result() for pair, future in zip(pairs, runs, strict=True)}
    show(table(found, args), title(found, args), args.json)


def title(found: Found, args: argparse.Namespace) -> str:
    first = fmean(steps[0][REWARD_MEAN] for steps in found.values())
    return (
        f"{args.seeds} seeds, {args.steps} steps, noise {args.noise:g}: rewards of each third of the steps, "
        f"mean and 95% interval over seeds; of the first step {first:.3f}"
    )


def table(found: Found, args: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for arm, replay in ARMS.items():
        runs = [found[seed, replay] for seed in range(args.seeds)]
        others = [found[seed, not replay] for seed in range(args.seeds)]
        gains = [reward(run, 2) - reward(other, 2) for run, other in zip(runs, others, strict=True)]
        rows.append(
            {
                "training": arm,
                "experts agree": fmean(step[EXPERT_AGREEMENT] for steps in runs for step in steps),
                "mismatch": fmean(step[MISMATCH] for steps in runs for step in steps),
                "in the last step": fmean(steps[-1][MISMATCH] for steps in runs),
                "reward, first third": interval([reward(steps, 0) for steps in runs]),
                "second": interval([reward(steps, 1) for steps in runs]),
                "last": interval([reward(steps, 2) for steps in runs]),
                "gain in the last": interval(gains) if replay else "",
            }
        )
    return rows


def reward(steps: list[dict[str, float]], third: int) -> float:
    size = len(steps) // 3
    return fmean(step[REWARD_MEAN] for step in steps[third * size :][:size])


def interval(values: list[float]) -> str:
    half = T_95[len(values)] * stdev(values) / math.sqrt(len(values))
    return f"{fmean(values):.3f} ± {half:.3f}"


def in_a_fork(work: Callable[..., None], home: Path, seed: int, replay: bool, *rest: Any) -> Any:
    """Do ``work`` in a fork, because a run has process groups and an engine of its own. Return its steps'
    metrics; a run that is complete in ``home`` is not repeated."""
    folder = home / f"{'with' if replay else 'without'}-replay-seed{seed}"
    if len(read_metrics(folder)) >= rest[-1].steps:
        return read_metrics(folder)
    child = FORK.Process(target=work, args=(home / f"model-{seed}", folder, seed, replay, *rest))
    child.start()
    child.join()
    if child.exitcode:
        raise RuntimeError(f"{folder}: the run ended with {child.exitcode}")
    return read_metrics(folder)


def alternates(question: str, response: str, gold: str) -> float:
    """The reward: the share of neighbouring characters of which exactly one is a digit."""
    digits = [character.isdigit() for character in response]
    return fmean(a != b for a, b in pairwise(digits)) if len(digits) > 1 else 0.0


def train(model: Path, folder: Path, seed: int, replay: bool, args: argparse.Namespace) -> None:
    from megatron_eqlen.objectives.recipes import parse
    from megatron_eqlen.rollout.vllm.engine import lifecycle
    from megatron_eqlen.run import loop

    recipe = parse(
        {
            "name": "replay", "run_dir": str(folder), "steps": args.steps, "seed": seed, "group_size": 8,
            "model": {"path": str(model), "dtype": "bfloat16"},
            "data": {
                "prompts_per_step": 8, "max_prompt_length": 16, "instruction_role": "none",
                "sources": [{"name": "words", "reader": "jsonl", "path": str(model / "questions.jsonl")}],
            },
            "reward": {"rubric": "tools.benchmarks.replay:alternates", "workers": 1},
            "rollout": {
                "temperature": 1.0, "top_p": 1.0, "top_k": 0, "max_response_length": 48, "max_num_seqs": 64,
                "kv_cache_gib": 0.1, "keep_routes": True,
            },
            "loss": {"kl_coef": 0, "router_replay": replay},
            "optimizer": {"lr": args.lr, "warmup_steps": 0},
            "packing": {"max_tokens_per_row": 1024},
            "checkpoint": {"every": args.steps},
        },
        "bench replay",
    )  # fmt: skip
    load = lifecycle.load_weights
    lifecycle.load_weights = lambda llm, weights: load(llm, with_noise(weights, args.noise))
    loop.train(recipe)


def with_noise(weights: Iterable[tuple[str, Tensor]], noise: float) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights; the same random numbers are added to those of routers at every sync."""
    for name, weight in weights:
        if name.endswith("mlp.gate.weight"):
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            random = torch.randn(weight.shape, generator=generator)
            weight = (weight.float() + noise * ROUTER_STD * random).to(weight.dtype)
        yield name, weight


def make_model(folder: Path, seed: int) -> None:
    """Make a random model whose experts matter, a tokenizer, and questions."""
    from transformers import AutoModelForCausalLM, GenerationConfig
    from transformers.models.qwen3_moe import Qwen3MoeConfig

    from megatron_eqlen.toys.tokenizer_maker import write_hf_tokenizer

    if folder.exists():
        return
    folder.mkdir(parents=True)
    write_hf_tokenizer(folder, ["0123456789 abcdefghijklmnopqrstuvwxyz"], vocab_size=300)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(Qwen3MoeConfig(**MODEL))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("mlp.gate.weight"):
                weight.normal_(0, ROUTER_STD)
            elif "experts" in name:
                weight.normal_(0, 0.3)
    model.bfloat16().save_pretrained(folder)
    ends = torch.randperm(300)[:ENDS].tolist()
    GenerationConfig(eos_token_id=ends, do_sample=True).save_pretrained(folder)
    rows = [{"question": f"{n}", "answer": "0", "grader": "rubric"} for n in range(64)]
    (folder / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
