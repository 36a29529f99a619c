"""The commands that convert models: ``tools/convert_hf_to_megatron.py``, ``tools/convert_megatron_to_hf.py``.

A model that is larger than a host's memory is divided over processes that torchrun starts, on one host or
several: ``torchrun --nproc-per-node 8 tools/convert_hf_to_megatron.py SOURCE OUT --pipeline 8``.

Exit status: 0 converted (and verified), 1 killed or crashed, 2 a mistake in the input or a full
disk, said in one line.
"""

from __future__ import annotations

import os

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch looks: conversion runs on the CPU

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from megatron_eqlen.models import convert
from megatron_eqlen.models.groups import start, stop
from megatron_eqlen.processes import failures
from megatron_eqlen.recipe import ParallelRecipe

PARTS = ("tensor", "pipeline", "expert")
"""Kinds of parallelism that may divide a model while it is converted."""


def hf_to_megatron(argv: list[str] | None = None) -> int:
    """Convert a Hugging Face folder to a torch_dist checkpoint."""
    parser = _parser(
        "hf-to-megatron" if argv is not None else None,
        "Convert a Hugging Face folder to a Megatron torch_dist checkpoint, for any layout.",
    )
    parser.add_argument("source", type=Path, help="Hugging Face folder: config.json and safetensors")
    parser.add_argument("out", type=Path, help="checkpoint folder to make; must not exist")
    args = parser.parse_args(argv)

    def run(parallel: ParallelRecipe) -> None:
        convert.hf_to_megatron(args.source, args.out, parallel)
        _verify(args.verify, args.out, args.source, args.source, parallel)

    return _guarded(parser, args, run)


def megatron_to_hf(argv: list[str] | None = None) -> int:
    """Convert a torch_dist checkpoint to a Hugging Face folder."""
    parser = _parser(
        "megatron-to-hf" if argv is not None else None,
        "Convert a Megatron torch_dist checkpoint, of any layout, to a Hugging Face folder.",
    )
    parser.add_argument("checkpoint", type=Path, help="checkpoint, or a run's checkpoints/ for its newest")
    parser.add_argument("out", type=Path, help="Hugging Face folder to make; must not exist")
    parser.add_argument(
        "--source",
        type=Path,
        required=True,
        help="the Hugging Face folder that training started from: gives configuration, tokenizer, dtypes, "
        "the division into files, and tensors that are not trained",
    )
    parser.add_argument(
        "--adapter",
        action="store_true",
        help="write a PEFT folder of a LoRA run's adapters, not the merged model",
    )
    args = parser.parse_args(argv)
    if args.adapter and args.verify:
        parser.error("--verify compares whole models: leave out --adapter or --verify")

    def run(parallel: ParallelRecipe) -> None:
        if args.adapter:
            convert.megatron_to_peft(args.checkpoint, args.source, args.out, parallel)
            return
        if args.verify == "logits":
            convert.check_logits_are_comparable(args.checkpoint)
        convert.megatron_to_hf(args.checkpoint, args.source, args.out, parallel)
        _verify(args.verify, args.checkpoint, args.out, args.source, parallel)

    return _guarded(parser, args, run)


def _parser(direction: str | None, description: str) -> argparse.ArgumentParser:
    """Return the parser. ``direction``: argument of ``eqlen convert``; None if a script of ``tools/`` was
    called."""
    parser = argparse.ArgumentParser(
        prog=direction and f"eqlen convert {direction}",
        description=description,
        epilog="On the CPU, in one process, or in as many as torchrun starts: the product of --tensor, "
        "--pipeline and --expert.",
    )
    parser.add_argument(
        "--verify",
        nargs="?",
        const="hash",
        choices=["hash", "logits"],
        help="read everything back and compare its bits (hash); also run both models in float32 (logits: "
        "both must fit in memory)",
    )
    for part in PARTS:
        parser.add_argument(
            f"--{part}", type=int, default=1, metavar="N", help=f"{part}-parallel processes (default 1)"
        )
    return parser


def _verify(
    level: str | None, checkpoint: Path, folder: Path, source: Path, parallel: ParallelRecipe
) -> None:
    if level is None:
        return
    digest = convert.verify_hash(checkpoint, folder, source, parallel)
    _say(f"same weights: sha256 {digest}")
    if level == "logits":
        error = convert.verify_logits(checkpoint, folder)
        _say(f"same logits: largest difference {error:.1e} of the largest logit")


def _say(text: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        print(text)


def _guarded(
    parser: argparse.ArgumentParser, args: argparse.Namespace, run: Callable[[ParallelRecipe], None]
) -> int:
    sizes = {part: getattr(args, part) for part in PARTS}
    alone = max(sizes.values()) == 1
    if not alone and args.verify == "logits":
        parser.error("--verify logits runs whole models, in one process")
    if alone:
        os.environ.pop("RANK", None)  # also inside an srun step
    try:
        parallel = ParallelRecipe.model_validate(sizes)
        start(parallel, seed=0)
        run(parallel)
    except (ValueError, OSError) as error:
        print(f"{parser.prog}: {failures.words(error)}", file=sys.stderr)
        return 2
    finally:
        stop()
    return 0
