"""GRPO steps of ours and of TRL, one after the other: same model, prompts, group, limit, dtype and threads.

TRL generates with Transformers, ours with vLLM. All weights are trained, with one update a step. Rewards are
coin flips, so that few groups are left out. TRL is not a requirement; have it in a folder of its own:

    .venv/bin/python -m pip install --no-deps --target build/trl trl==1.16.0 accelerate datasets dill \\
        xxhash multiprocess pandas python-dateutil six
    tools/bench.py peer runs/smollm2/sft/export --data runs/smollm2/data/train.jsonl --trl build/trl
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any
from zlib import crc32

from tools.benchmarks.table import show

COIN = "tools.benchmarks.peer:coin"
RATE = 1e-6
ROW = 2048
"""Tokens of a row of ours."""
ROWS = 16
"""Responses of a forward pass of TRL."""
WARM = 1
"""First steps that do not count."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="folder of a Hugging Face checkpoint")
    parser.add_argument("--data", required=True, help="JSON lines with a question and an answer each")
    parser.add_argument("--trl", default="build/trl", help="folder in which TRL is installed")
    parser.add_argument("--work", default="build/peer", help="folder for the runs")
    parser.add_argument("--prompts", type=int, default=16, help="of a step")
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--limit", type=int, default=64, help="tokens of a response")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--side", choices=["ours", "trl"], help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> None:
    if args.side:
        print(json.dumps({"ours": ours, "trl": trl}[args.side](args)))
        return
    results = []
    for side in ("ours", "trl"):
        environment = os.environ | {"OMP_NUM_THREADS": str(args.threads)}
        if side == "trl":
            environment["PYTHONPATH"] = args.trl
        command = [sys.executable, *sys.argv, "--side", side]
        printed = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True).stdout
        results.append({"system": side} | json.loads(printed.splitlines()[-1]))
    show(results, f"{args.prompts} x {args.group_size} responses, {args.dtype}, {args.threads} threads")


def coin(response: str, answer: str) -> float:
    """Return 0 or 1 by the response's text alone."""
    return float(crc32(response.encode()) & 1)


def ours(args: argparse.Namespace) -> dict[str, float]:
    folder = Path(args.work, f"ours-{time.time_ns()}")
    overrides = {
        "run_dir": folder,
        "steps": WARM + args.steps,
        "sampling": "independent",
        "group_size": args.group_size,
        "model.path": args.model,
        "model.dtype": args.dtype,
        "lora.rank": 0,
        "data.prompts_per_step": args.prompts,
        "data.sources": json.dumps([{"name": "rows", "reader": "jsonl", "path": args.data, "grader": COIN}]),
        "rollout.max_response_length": args.limit,
        "rollout.max_num_seqs": args.prompts * args.group_size,
        "packing.max_tokens_per_row": ROW,
        "optimizer.lr": RATE,
        "evaluation.benchmarks": [],
        "cluster.cpus_per_process": args.threads,
    }
    eqlen = str(Path(sys.executable).with_name("eqlen"))
    overriding = [f"{key}={value}" for key, value in overrides.items()]
    subprocess.run([eqlen, "train", "recipes/smollm2_cpu.yaml", *overriding], stdout=sys.stderr, check=True)
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()][WARM:]
    names = ("harvest/generated_tokens", "harvest/seconds", "time/train", "time/step")
    return _means([tuple(step[name] for name in names) for step in steps])


def trl(args: argparse.Namespace) -> dict[str, float]:
    import torch
    from datasets import Dataset  # pyright: ignore[reportMissingImports]
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports]

    torch.set_num_threads(args.threads)
    generated: list[tuple[int, float]] = []
    begins: list[float] = []

    class Timed(GRPOTrainer):
        def _generate_and_score_completions(self, inputs: Any) -> Any:
            began = time.perf_counter()
            outputs = super()._generate_and_score_completions(inputs)
            generated.append((int(outputs["completion_mask"].sum()), time.perf_counter() - began))
            return outputs

    class Clock(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            begins.append(time.perf_counter())

        def on_train_end(self, *_: Any, **__: Any) -> None:
            begins.append(time.perf_counter())

    questions = [json.loads(line)["question"] for line in Path(args.data).read_text().splitlines()]
    rows = Dataset.from_list([{"prompt": [{"role": "user", "content": question}]} for question in questions])
    config = GRPOConfig(
        output_dir=f"{args.work}/trl",
        max_steps=WARM + args.steps,
        per_device_train_batch_size=ROWS,
        gradient_accumulation_steps=args.prompts * args.group_size // ROWS,
        num_generations=args.group_size,
        max_completion_length=args.limit,
        learning_rate=RATE,
        beta=0.0,
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=False,
        report_to="none",
        save_strategy="no",
        model_init_kwargs={"dtype": args.dtype},
    )

    def rewards(completions: list[Any], **_: Any) -> list[float]:
        return [coin(completion[0]["content"], "") for completion in completions]

    trainer = Timed(
        model=args.model, reward_funcs=rewards, args=config, train_dataset=rows, callbacks=[Clock()]
    )
    trainer.train()
    steps = [end - begin for begin, end in pairwise(begins)]
    parts = zip(generated, steps, strict=True)
    return _means([(tokens, seconds, step - seconds, step) for (tokens, seconds), step in parts][WARM:])


def _means(steps: Sequence[tuple[float, ...]]) -> dict[str, float]:
    """Return means of ``steps``: responses' tokens, and seconds of generation, of training, and in all."""
    tokens, generation, training, whole = (mean(column) for column in zip(*steps, strict=True))
    return {
        "tokens": round(tokens),
        "generation, tokens/s": round(tokens / generation),
        "training, tokens/s": round(tokens / training),
        "s a step": round(whole, 1),
    }
