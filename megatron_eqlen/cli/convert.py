"""The commands that convert models: ``tools/convert_hf_to_megatron.py``, ``tools/convert_megatron_to_hf.py``.

Exit status: 0 converted (and verified), 1 killed or crashed, 2 a mistake in the input or a full
disk, said in one line.
"""

from __future__ import annotations

import os

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch looks: conversion runs on the CPU

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from megatron_eqlen.models import convert
from megatron_eqlen.models.groups import start, stop
from megatron_eqlen.processes import failures
from megatron_eqlen.recipe import ParallelRecipe


def hf_to_megatron(argv: list[str] | None = None) -> int:
    """Convert a Hugging Face folder to a torch_dist checkpoint."""
    parser = _parser(
        "hf-to-megatron" if argv is not None else None,
        "Convert a Hugging Face folder to a Megatron torch_dist checkpoint, for any layout.",
    )
    parser.add_argument("source", type=Path, help="Hugging Face folder: config.json and safetensors")
    parser.add_argument("out", type=Path, help="checkpoint folder to make; must not exist")
    args = parser.parse_args(argv)

    def run() -> None:
        with _progress("converting", args.source) as progress:
            convert.hf_to_megatron(args.source, args.out, progress)
        _verify(args.verify, args.out, args.source, args.source)

    return _guarded(parser.prog, run)


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

    def run() -> None:
        if args.adapter:
            convert.megatron_to_peft(args.checkpoint, args.source, args.out)
            return
        if args.verify == "logits":
            convert.check_logits_are_comparable(args.checkpoint)
        with _progress("converting", args.source) as progress:
            convert.megatron_to_hf(args.checkpoint, args.source, args.out, progress)
        _verify(args.verify, args.checkpoint, args.out, args.source)

    return _guarded(parser.prog, run)


def _parser(direction: str | None, description: str) -> argparse.ArgumentParser:
    """Return the parser. ``direction``: argument of ``eqlen convert``; None if a script of ``tools/`` was
    called."""
    parser = argparse.ArgumentParser(
        prog=direction and f"eqlen convert {direction}",
        description=description,
        epilog="One process, on the CPU.",
    )
    parser.add_argument(
        "--verify",
        nargs="?",
        const="hash",
        choices=["hash", "logits"],
        help="read everything back and compare its bits (hash); also run both models in float32 (logits: "
        "both must fit in memory)",
    )
    return parser


def _verify(level: str | None, checkpoint: Path, folder: Path, source: Path) -> None:
    if level is None:
        return
    with _progress("verifying", folder) as progress:
        digest = convert.verify_hash(checkpoint, folder, source, progress)
    print(f"same weights: sha256 {digest}")
    if level == "logits":
        error = convert.verify_logits(checkpoint, folder)
        print(f"same logits: largest difference {error:.1e} of the largest logit")


@contextlib.contextmanager
def _progress(verb: str, folder: Path) -> Iterator[convert.Progress]:
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(verb, total=convert.converted_bytes(folder))
        yield lambda nbytes: bar.advance(task, nbytes)


def _guarded(name: str, run: Callable[[], None]) -> int:
    os.environ.pop("RANK", None)  # one process, also inside an srun step
    start(ParallelRecipe(), seed=0)
    try:
        run()
    except (ValueError, OSError) as error:
        print(f"{name}: {failures.words(error)}", file=sys.stderr)
        return 2
    finally:
        stop()
    return 0
