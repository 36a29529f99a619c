"""Recorded rollouts on the terminal: ``eqlen inspect``."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from megatron_eqlen.data.tokenizers import load_tokenizer
from megatron_eqlen.recipe import EqualLengthRecipe
from megatron_eqlen.report.format import compact
from megatron_eqlen.report.rollouts import (
    PairView,
    RolloutView,
    SegmentView,
    dump_files,
    view,
)
from megatron_eqlen.rollout.recorder import read_dump

STYLES = {"raised": "green", "lowered": "red", "equal": "yellow", "plain": "default"}


def print_rollouts(streams: Path, model: Path, limit: int = 5, console: Console | None = None) -> None:
    """Print the first ``limit`` rollouts of a file, of a step's folder, or of a run's ``streams/`` folder.

    ``model`` is the folder whose tokenizer decodes. B sides show the paper's reward, the suffix maximum.
    Raises ValueError naming the path if there is nothing to read.
    """
    console = console or Console(highlight=False)
    files = dump_files(streams)
    decode = load_tokenizer(model).decode
    printed = 0
    for file in files:
        rollouts = read_dump(file)[: limit - printed]
        if rollouts and len(files) > 1:
            console.rule(f"{file.parent.name}/{file.name}", characters="─")
        for rollout in rollouts:
            _print(console, view(rollout, decode, EqualLengthRecipe()))
        printed += len(rollouts)
        if printed >= limit:
            break
    if not printed:
        raise ValueError(f"{streams}: expected at least one recorded rollout, found none")


def _print(console: Console, rollout: RolloutView) -> None:
    console.print(Text.assemble((rollout.prompt_id, "bold"), "  ", rollout.title))
    if rollout.question:
        console.print(Padding(Text(rollout.question, "italic"), (0, 0, 0, 2)))
    for pair in rollout.pairs:
        _print_pair(console, pair)
    for segment in rollout.segments:
        _print_segment(console, segment, indent=2)
    console.print()


def _print_pair(console: Console, pair: PairView) -> None:
    heading = f"{pair.a.length} tokens a side, {pair.a.inherited} inherited, "
    console.print(Text.assemble("  ", heading, (pair.use, "bold" if pair.use == "trained" else "dim")))
    _print_segment(console, pair.a, indent=4)
    _print_segment(console, pair.b, indent=4)


def _print_segment(console: Console, segment: SegmentView, indent: int) -> None:
    reward = f"reward {compact(segment.reward)}" if segment.reward is not None else ""
    facts = ", ".join(filter(None, [reward, segment.verdict, segment.end, f"{segment.length} tokens"]))
    console.print(Text.assemble(" " * indent, (segment.label, f"bold {STYLES[segment.role]}"), "  ", facts))
    before = f"…{segment.before}▸" if segment.before else ""
    text = Text.assemble((before, "dim"), (segment.text, STYLES[segment.role]))
    console.print(Padding(text, (0, 0, 0, indent + 2)))
