#!/usr/bin/env python
"""Make and warm up a tiny Qwen3: a Hugging Face folder that training and vLLM load like a real one.

    tools/make_tiny_model.py --data runs/search/data/train.parquet --out models/tiny
    tools/make_tiny_model.py --data mine.jsonl --out models/mine

The demonstrations of a DeepMath-103K parquet file, or the answers of any file that the reader `jsonl` knows,
become a tokenizer and a few hundred steps of ``eqlen train`` with ``objective: sft``. The same arguments give
the same weights; a folder that was made with the same arguments is left as it is. With ``--steps 0`` the
weights stay random. Words KEY=VALUE are recipe overrides of the training.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pyarrow.parquet as pq
import torch
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

from megatron_eqlen.data import jsonl
from megatron_eqlen.data.layouts import final_answer
from megatron_eqlen.data.rows import Tally
from megatron_eqlen.hf.tokenizer import Turn
from megatron_eqlen.processes.failures import run_script

sys.path.insert(0, str(Path(__file__).parents[1]))
from tools.tokenizer_maker import write_hf_tokenizer

SOLUTIONS = ("r1_solution_1", "r1_solution_2", "r1_solution_3")
VOCAB_SIZE = 384
TOKENIZER_TEXTS = 3000
"""Number of demonstrations that the tokenizer is trained on."""
NO_COLUMNS: Mapping[str, str] = MappingProxyType({})
CONFIG = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 288,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "initializer_range": 0.02,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
"""Every size is divisible by 2 for tensor parallelism."""


@dataclass(frozen=True)
class Warmup:
    """Settings of a warm-up; with the data's hash, all that its weights depend on."""

    steps: int
    batch_size: int
    seed: int
    processes: int
    overrides: tuple[str, ...] = ()

    def recipe(self, model: Path, rows: Path, run: Path) -> dict[str, Any]:
        source = {"name": "rows", "reader": "jsonl", "path": str(rows), "keep_duplicates": True}
        return {
            "name": "warmup", "objective": "sft", "steps": self.steps, "seed": self.seed, "run_dir": str(run),
            "model": {"path": str(model), "dtype": "float32", "megatron": {"adam_beta2": 0.98}},
            "data": {"prompts_per_step": self.batch_size, "sources": [source]},
            "optimizer": {
                "lr": 3e-3, "min_lr": 6e-5, "lr_schedule": "cosine", "warmup_steps": min(20, self.steps // 2),
            },
            "packing": {"max_tokens_per_row": CONFIG["max_position_embeddings"]},
            "checkpoint": {"every": self.steps, "keep": 1},
            "cluster": {"device": "cpu", "processes_per_node": self.processes, "cpus_per_process": 1},
        }  # fmt: skip


Text = tuple[list[Turn], str]
"""Turns of a chat, and the response to imitate."""


def read_texts(path: Path, plain: bool = False, columns: Mapping[str, str] = NO_COLUMNS) -> list[Text]:
    """Return the demonstrations of a DeepMath-103K parquet file; of another file those that imitate its
    answers: each with its last line in a box, which the grader ``math`` reads, or ``plain``."""
    if path.suffix == ".parquet" and {*SOLUTIONS} <= {*pq.read_schema(path).names}:
        if plain or columns:
            raise ValueError(f"{path}: --plain and --columns have no effect: {SOLUTIONS[0]} is imitated")
        table = pq.read_table(path, columns=["question", *SOLUTIONS]).to_pylist()
        return [(_asked(row["question"]), row[column]) for row in table for column in SOLUTIONS]
    tally, texts = Tally(), list[Text]()
    for problem in jsonl.read(path, tally, columns, grader="none"):  # which leaves the answer as it stands
        answer = problem.gold if plain or "\\boxed{" in problem.gold else _boxed(problem.gold)
        texts.append((list(problem.messages or _asked(problem.question)), answer))
    print(f"{path}: {len(texts)} answers to imitate; rows left out: {dict(tally.dropped) or 'none'}")
    if not texts:
        raise ValueError(f"{path}: expected rows with an answer, found none")
    return texts


def _asked(question: str) -> list[Turn]:
    return [{"role": "user", "content": question}]


def _boxed(answer: str) -> str:
    """Return a worked solution with its final answer in a box: ``3 * 6 = 18\n\\boxed{18}``."""
    final = final_answer(answer)
    return ("" if final == answer else answer.partition("####")[0].rstrip() + "\n") + f"\\boxed{{{final}}}"


def fingerprint(warmup: Warmup, data: Path, plain: bool, columns: Mapping[str, str]) -> dict[str, Any]:
    """Return all that the model depends on."""
    fixed: dict[str, Any] = {"family": "qwen3", "tokenizer": "hf", "objective": "sft"}
    fixed |= {"plain": plain} if plain else {}
    fixed |= {"columns": dict(columns)} if columns else {}
    fixed |= asdict(warmup) | {"overrides": [*warmup.overrides]}
    return fixed | {"data_sha256": hashlib.sha256(data.read_bytes()).hexdigest()}


def make(
    out: Path, data: Path, warmup: Warmup, plain: bool = False, columns: Mapping[str, str] = NO_COLUMNS
) -> None:
    """Write the model folder ``out``; it appears complete or not at all."""
    wanted = fingerprint(warmup, data, plain, columns)
    record = out / "made_by.json"
    if record.is_file() and json.loads(record.read_text()) == wanted:
        print(f"{out}: made with the same arguments before, left as it is")
        return
    if out.exists():
        raise SystemExit(
            f"{out}: exists, and was made with other arguments; remove it or choose another --out"
        )
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent.resolve()) as scratch:
        folder = _make(Path(scratch), read_texts(data, plain, columns), warmup)
        (folder / record.name).write_text(json.dumps(wanted, indent=2) + "\n")
        folder.rename(out)


def _make(scratch: Path, texts: list[Text], warmup: Warmup) -> Path:
    """Return the folder of the model, in ``scratch``."""
    model, rows, recipe, run = (scratch / name for name in ("random", "rows.jsonl", "warmup.yaml", "run"))
    corpus = ["\n".join([*(turn["content"] for turn in turns), text]) for turns, text in texts]
    write_hf_tokenizer(model, corpus[:TOKENIZER_TEXTS], VOCAB_SIZE)
    torch.manual_seed(warmup.seed)
    random = Qwen3ForCausalLM(Qwen3Config(**CONFIG))
    random.generation_config = GenerationConfig.from_pretrained(model)
    random.config.eos_token_id = random.generation_config.eos_token_id[0]
    random.save_pretrained(model)
    if not warmup.steps:
        return model
    chats = [{"messages": [*turns, {"role": "assistant", "content": text}]} for turns, text in texts]
    rows.write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    recipe.write_text(json.dumps(warmup.recipe(model, rows, run)))
    train = [sys.executable, "-m", "megatron_eqlen.cli", "train", recipe, *warmup.overrides]
    with subprocess.Popen(train, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if not re.match(r"step (?!\d*[05]0/)|warmup sft", line):  # of hundreds of steps every fiftieth
                print(line, end="", flush=True)
    if process.returncode:
        raise SystemExit(process.returncode)
    return run / "export"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="file of questions with answers")
    parser.add_argument("--plain", action="store_true", help="answers as they stand, without a \\boxed{}")
    parser.add_argument(
        "--columns", nargs="+", default=[], metavar="OURS=THEIRS", help="as a source's columns: question=task"
    )
    parser.add_argument("--out", type=Path, required=True, help="model folder to write")
    parser.add_argument("--steps", type=int, default=500, help="optimizer steps; 0 leaves the weights random")
    parser.add_argument("--batch-size", type=int, default=32, help="demonstrations a step")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=2, help="part of what the weights depend on")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="recipe overrides of the training")
    args = parser.parse_args()
    if not args.data.is_file():
        parser.error(f"--data: no such file: {args.data}")
    if not 1 <= args.processes <= args.batch_size:
        parser.error(f"--processes: expected 1 to --batch-size {args.batch_size}, found {args.processes}")
    if wrong := [pair for pair in args.columns if "=" not in pair]:
        parser.error(f"--columns: expected OURS=THEIRS, found {wrong[0]!r}")
    if args.overrides and not args.steps:
        parser.error(f"{args.overrides[0]} has no effect with --steps 0: nothing is trained")
    columns = dict(pair.split("=", 1) for pair in args.columns)
    warmup = Warmup(args.steps, args.batch_size, args.seed, args.processes, tuple(args.overrides))
    make(args.out, args.data, warmup, args.plain, columns)


if __name__ == "__main__":
    run_script(main)
