"""``eqlen convert``: models between Hugging Face folders and Megatron checkpoints.

A model larger than a host's memory is divided over processes that torchrun starts, on one host or several:
``torchrun --nproc-per-node 8 -m megatron_eqlen.cli convert hf-to-megatron SOURCE OUT --pipeline 8``. Exit
status: 0 converted (and verified), 1 killed or crashed, 2 a mistake in the input or a full disk.
"""

from __future__ import annotations

import os

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch looks: conversion runs on the CPU

import argparse
import sys
from pathlib import Path

from megatron_eqlen.models import convert
from megatron_eqlen.models.groups import start, stop
from megatron_eqlen.processes import failures
from megatron_eqlen.recipe import ParallelRecipe

ABOUT = {
    "hf-to-megatron": "Convert a Hugging Face folder to a Megatron torch_dist checkpoint, for any layout.",
    "megatron-to-hf": "Convert a Megatron torch_dist checkpoint, of any layout, to a Hugging Face folder.",
}
PARTS = ("tensor", "pipeline", "expert")
"""Kinds of parallelism that may divide a model while it is converted."""


def main(direction: str, argv: list[str]) -> int:
    """Convert as ``eqlen convert DIRECTION`` with the arguments ``argv``."""
    parser = _parser(direction)
    args = parser.parse_args(argv)
    sizes = {part: getattr(args, part) for part in PARTS}
    alone = max(sizes.values()) == 1
    if wrong := [part for part in PARTS if sizes[part] < 1]:
        parser.error(f"--{wrong[0]}: expected a number from 1 on, found {sizes[wrong[0]]}")
    if not alone and args.verify == "logits":
        parser.error("--verify logits runs whole models, in one process")
    if args.verify and getattr(args, "adapter", False):
        parser.error("--verify compares whole models: leave out --adapter or --verify")
    if alone:
        os.environ.pop("RANK", None)  # also inside an srun step
    try:
        parallel = ParallelRecipe.model_validate(sizes)
        start(parallel, seed=0)
        _convert(direction, args, parallel)
    except (ValueError, OSError) as error:
        print(f"{parser.prog}: {failures.words(error)}", file=sys.stderr)
        return 2
    finally:
        stop()
    return 0


def _parser(direction: str) -> argparse.ArgumentParser:
    how = "in one process, or in as many as torchrun starts: the product of --tensor, --pipeline and --expert"
    name, epilog = f"eqlen convert {direction}", f"On the CPU, {how}."
    parser = argparse.ArgumentParser(prog=name, description=ABOUT[direction], epilog=epilog)
    # Each direction has arguments of its own; those below are common.
    if direction == "hf-to-megatron":
        parser.add_argument("source", type=Path, help="Hugging Face folder: config.json and safetensors")
        parser.add_argument("out", type=Path, help="checkpoint folder to make; must not exist")
    else:
        about = "checkpoint, or a run's checkpoints/ for its newest"
        parser.add_argument("checkpoint", type=Path, help=about)
        parser.add_argument("out", type=Path, help="Hugging Face folder to make; must not exist")
        gives = "configuration, tokenizer, dtypes, the division into files, and tensors that are not trained"
        about = f"the Hugging Face folder that training started from: gives {gives}"
        parser.add_argument("--source", type=Path, required=True, help=about)
        about = "write a PEFT folder of a LoRA run's adapters, not the merged model"
        parser.add_argument("--adapter", action="store_true", help=about)
    both = "run both models in float32 (logits: both must fit in memory)"
    about = f"read everything back and compare its bits (hash); also {both}"
    parser.add_argument("--verify", nargs="?", const="hash", choices=["hash", "logits"], help=about)
    for part in PARTS:
        about = f"{part}-parallel processes (default 1)"
        parser.add_argument(f"--{part}", type=int, default=1, metavar="N", help=about)
    return parser


def _convert(direction: str, args: argparse.Namespace, parallel: ParallelRecipe) -> None:
    if direction == "hf-to-megatron":
        checkpoint, folder = args.out, args.source
        convert.hf_to_megatron(folder, checkpoint, parallel)
    # An adapter's folder has no whole model to compare.
    elif args.adapter:
        convert.megatron_to_peft(args.checkpoint, args.source, args.out, parallel)
        return
    else:
        checkpoint, folder = args.checkpoint, args.out
        if args.verify == "logits":
            convert.check_logits_are_comparable(checkpoint)
        convert.megatron_to_hf(checkpoint, args.source, folder, parallel)
    if args.verify is None:
        return
    digest = convert.verify_hash(checkpoint, folder, args.source, parallel)
    if os.environ.get("RANK", "0") == "0":
        print(f"same weights: sha256 {digest}")
    if args.verify == "logits":  # in one process
        error = convert.verify_logits(checkpoint, folder)
        print(f"same logits: largest difference {error:.1e} of the largest logit")
