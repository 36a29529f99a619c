"""Recorded rollouts on a terminal: ``eqlen inspect``."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.text import Text

from megatron_eqlen.recipe import EqualLengthRecipe
from megatron_eqlen.report.streams import Piece, read_step, text_decoder, view
from megatron_eqlen.rollout.recorder import read_dump
from megatron_eqlen.types import Rollout

STYLES = {
    "inherited": "dim",
    "raised": "green",
    "lowered": "red",
    "skipped": "yellow",
    "untrained": "dim strike",
}


def print_rollouts(streams: Path, model: Path, limit: int = 5, console: Console | None = None) -> None:
    """Print the first ``limit`` rollouts of a ``streams/`` folder, of one of its steps, or of a file.

    Raises ValueError if there are none.
    """
    console = console or Console()
    decode = text_decoder(model)
    for rollout in read_rollouts(streams)[:limit]:
        shown = view(rollout, decode, EqualLengthRecipe())
        console.print(Text(shown.title, style="bold"))
        for row in shown.rows:
            console.print(Text.assemble("  ", *(_styled(piece) for piece in row)), soft_wrap=True)
        console.print()


def read_rollouts(path: Path) -> list[Rollout]:
    """The rollouts under ``path``. Raises ValueError if there are none."""
    if path.is_file():
        rollouts = read_dump(path)
    else:
        steps = sorted(path.glob("step-*")) or [path]
        rollouts = [rollout for step in steps for rollout in read_step(step)]
    if not rollouts:
        raise ValueError(f"{path}: expected recorded rollouts (*.jsonl), found none")
    return rollouts


def _styled(piece: Piece) -> tuple[str, str]:
    text = piece.text.replace("\n", "⏎")
    reward = "" if piece.reward is None else f" r={piece.reward:g}"
    mark = f"[{piece.label}{reward}]" if piece.label else ""
    return f"{mark}{text}", STYLES[piece.role]
