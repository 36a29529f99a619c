#!/usr/bin/env python
"""Make and warm up a tiny Qwen3: a Hugging Face folder that training and vLLM load like a real one.

    tools/make_tiny_model.py --data runs/search/data/train.parquet --out models/tiny
    tools/make_tiny_model.py --data mine.jsonl --out models/mine

The demonstrations of a DeepMath-103K parquet file, or the answers of any file that the reader `jsonl` knows,
become a tokenizer and a few hundred steps of supervised fine-tuning with plain Transformers: one
single-threaded process a core, gradients summed. The same arguments give the same weights; a folder that was
made with the same arguments is left as it is. With ``--steps 0`` the weights stay random.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import random
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import pyarrow.parquet as pq
import torch
import torch.distributed as dist
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch.multiprocessing.spawn import start_processes
from torch.nn import functional as F
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging as transformers_logging

from megatron_eqlen.data import jsonl
from megatron_eqlen.data.layouts import final_answer
from megatron_eqlen.data.rows import Tally
from megatron_eqlen.hf.tokenizer import Tokenizer, Turn, load_tokenizer
from megatron_eqlen.processes.failures import run_script

sys.path.insert(0, str(Path(__file__).parents[1]))
from tools.tokenizer_maker import END_OF_TURN, write_hf_tokenizer

SOLUTIONS = ("r1_solution_1", "r1_solution_2", "r1_solution_3")
VOCAB_SIZE = 384
TOKENIZER_TEXTS = 3000
"""Number of demonstrations that the tokenizer is trained on."""
ALIKE = 3
"""Number of demonstrations of similar length that are computed together."""
NO_COLUMNS: Mapping[str, str] = MappingProxyType({})
LR, MUON_LR = 3e-3, 3e-2
"""Peak learning rates of AdamW and of Muon."""
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


Text = tuple[list[Turn], str]
"""Turns of a chat, and the response to imitate."""


@dataclass(frozen=True)
class Example:
    token_ids: list[int]
    prompt_length: int


def read_texts(path: Path, plain: bool = False, columns: Mapping[str, str] = NO_COLUMNS) -> list[Text]:
    """Return the demonstrations of a DeepMath-103K parquet file; of another file those that imitate its
    answers: each with its last line in a box, which the grader ``math`` reads, or ``plain``."""
    if path.suffix == ".parquet" and {*SOLUTIONS} <= {*pq.read_schema(path).names}:
        table = pq.read_table(path, columns=["question", *SOLUTIONS]).to_pylist()
        return [(_asked(row["question"]), row[column]) for row in table for column in SOLUTIONS]
    tally, texts = Tally(), list[Text]()
    for problem in jsonl.read(path, tally, columns, grader="rubric"):  # which leaves the answer as it stands
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


def draw_examples(texts: list[Text], count: int, tokenizer: Tokenizer, seed: int) -> list[Example]:
    """Return ``count`` encoded demonstrations, epoch after epoch in random order."""
    rng = random.Random(seed)
    drawn: list[Text] = []
    while len(drawn) < count:
        drawn += rng.sample(texts, len(texts))
    return [encode(tokenizer, *text) for text in drawn[:count]]


def encode(tokenizer: Tokenizer, turns: list[Turn], response: str) -> Example:
    """Encode a chat without an instruction, as recipes with ``instruction_role: none`` ask."""
    prompt = tokenizer.apply_chat_template(turns)
    return Example(prompt + tokenizer.encode(response + END_OF_TURN), len(prompt))


def collate(batch: list[Example], pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``input_ids`` and ``labels``, [B, T] int64 each; labels are -100 on prompts and padding."""
    width = max(len(example.token_ids) for example in batch)
    input_ids = np.full((len(batch), width), pad)
    labels = np.full((len(batch), width), -100)
    for row, example in enumerate(batch):
        length = len(example.token_ids)
        input_ids[row, :length] = example.token_ids
        labels[row, example.prompt_length : length] = example.token_ids[example.prompt_length :]
    return torch.from_numpy(input_ids), torch.from_numpy(labels)


def backward(model: torch.nn.Module, batch: list[Example], pad: int) -> tuple[float, int]:
    """Add the gradient of the batch's summed loss; return that loss and the number of supervised tokens."""
    loss_sum, tokens = 0.0, 0
    by_length = sorted(batch, key=lambda example: len(example.token_ids))
    for start in range(0, len(batch), ALIKE):  # lengths have a heavy tail: all in one would be half padding
        input_ids, labels = collate(by_length[start : start + ALIKE], pad)
        logits = model(input_ids=input_ids, use_cache=False).logits[:, :-1]
        loss = F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
        loss.backward()
        loss_sum, tokens = loss_sum + loss.item(), tokens + int((labels >= 0).sum())
    return loss_sum, tokens


def average_over_processes(model: torch.nn.Module, loss_sum: float, tokens: int) -> float:
    """Turn every process's summed gradient into the global mean over tokens; return the global mean loss."""
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    flat = torch.cat(
        [torch.tensor([loss_sum, float(tokens)])] + [gradient.flatten() for gradient in gradients]
    )
    if dist.is_initialized():
        dist.all_reduce(flat)
    sizes = [gradient.numel() for gradient in gradients]
    for gradient, piece in zip(gradients, flat[2:].div_(flat[1].item()).split(sizes), strict=True):
        gradient.copy_(piece.view_as(gradient))
    return (flat[0] / flat[1]).item()


def make_optimizers(model: torch.nn.Module) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices inside the layers (far fewer steps than with AdamW), AdamW for the
    rest."""
    inner = [p for name, p in model.named_parameters() if p.ndim == 2 and ".layers." in name]
    inside = set(map(id, inner))
    outer = [parameter for parameter in model.parameters() if id(parameter) not in inside]
    return [
        torch.optim.Muon(inner, lr=MUON_LR, weight_decay=0.01),
        torch.optim.AdamW(outer, lr=LR, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def make_schedule(optimizer: torch.optim.Optimizer, steps: int) -> torch.optim.lr_scheduler.LambdaLR:
    """Return 20 warm-up steps, then a cosine to 2% of the peak."""
    return torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: (
            min(1.0, (step + 1) / 20) * (0.02 + 0.49 * (1 + math.cos(math.pi * step / max(steps, 1))))
        ),
    )


def update(
    model: torch.nn.Module, optimizers: list[torch.optim.Optimizer], share: list[Example], pad: int
) -> float:
    """Take one optimizer step on all processes' shares of a batch; return the batch's mean loss."""
    model.zero_grad(set_to_none=False)
    loss = average_over_processes(model, *backward(model, share, pad))
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        optimizer.step()
    return loss


def train(rank: int, warmup: Warmup, examples: list[Example], folder: str, pad: int) -> None:
    """Run one process of the warm-up, with every ``processes``-th example; process 0 saves into
    ``folder``."""
    torch.set_num_threads(1)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    if warmup.processes > 1:
        rendezvous = f"file://{folder}/rendezvous"
        dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=warmup.processes)
    torch.manual_seed(warmup.seed)
    model = Qwen3ForCausalLM(Qwen3Config(**CONFIG))
    optimizers = make_optimizers(model)
    schedules = [make_schedule(optimizer, warmup.steps) for optimizer in optimizers]
    shares = [
        examples[start : start + warmup.batch_size][rank :: warmup.processes]
        for start in range(0, len(examples), warmup.batch_size)
    ]
    columns = (TextColumn("warm-up"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, TextColumn("loss {task.fields[loss]:.3f}"), disable=rank > 0) as progress:
        task = progress.add_task("", total=warmup.steps, loss=math.nan)
        for share in shares[: warmup.steps]:
            loss = update(model, optimizers, share, pad)
            for schedule in schedules:
                schedule.step()
            progress.update(task, advance=1, loss=loss)
    if rank == 0:
        model.generation_config = GenerationConfig.from_pretrained(folder)
        model.config.eos_token_id = model.generation_config.eos_token_id[0]
        model.save_pretrained(folder)
    if dist.is_initialized():
        dist.destroy_process_group()


def fingerprint(warmup: Warmup, data: Path, plain: bool, columns: Mapping[str, str]) -> dict[str, Any]:
    """Return all that the model depends on."""
    fixed: dict[str, Any] = {"family": "qwen3", "tokenizer": "hf", "lr": LR, "muon_lr": MUON_LR}
    fixed |= {"plain": plain} if plain else {}
    fixed |= {"columns": dict(columns)} if columns else {}
    return fixed | asdict(warmup) | {"data_sha256": hashlib.sha256(data.read_bytes()).hexdigest()}


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
        folder = Path(scratch) / out.name
        _make(folder, read_texts(data, plain, columns), warmup)
        (folder / record.name).write_text(json.dumps(wanted, indent=2) + "\n")
        folder.rename(out)


def _make(folder: Path, texts: list[Text], warmup: Warmup) -> None:
    corpus = ["\n".join([*(turn["content"] for turn in turns), text]) for turns, text in texts]
    write_hf_tokenizer(folder, corpus[:TOKENIZER_TEXTS], VOCAB_SIZE)
    tokenizer = load_tokenizer(folder)
    longest = CONFIG["max_position_embeddings"]
    short = [text for text in texts if len(encode(tokenizer, *text).token_ids) <= longest]
    if len(short) < len(texts):
        print(f"{len(texts) - len(short)} of {len(texts)} answers are longer than {longest} tokens: left out")
    if not short:
        raise ValueError(f"expected answers of at most {longest} tokens with their questions, found none")
    examples = draw_examples(short, warmup.steps * warmup.batch_size, tokenizer, warmup.seed)
    arguments = (warmup, examples, str(folder), tokenizer.pad_token_id)
    if warmup.processes == 1:
        train(0, *arguments)
    else:
        start_processes(train, arguments, warmup.processes, start_method="fork")  # imports take seconds
    (folder / "rendezvous").unlink(missing_ok=True)


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
    args = parser.parse_args()
    if not args.data.is_file():
        parser.error(f"--data: no such file: {args.data}")
    if not 1 <= args.processes <= args.batch_size:
        parser.error(f"--processes: expected 1 to --batch-size {args.batch_size}, found {args.processes}")
    if wrong := [pair for pair in args.columns if "=" not in pair]:
        parser.error(f"--columns: expected OURS=THEIRS, found {wrong[0]!r}")
    columns = dict(pair.split("=", 1) for pair in args.columns)
    warmup = Warmup(args.steps, args.batch_size, args.seed, args.processes)
    make(args.out, args.data, warmup, args.plain, columns)


if __name__ == "__main__":
    run_script(main)
