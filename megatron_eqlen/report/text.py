"""Recorded rollouts on the terminal: ``eqlen inspect``."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from megatron_eqlen.hf.tokenizer import load_decoder
from megatron_eqlen.recipe import Recipe
from megatron_eqlen.recipe.load import RECIPE, load
from megatron_eqlen.record.reader import recorded_steps
from megatron_eqlen.record.recorder import FILES
from megatron_eqlen.report.recorded import RecordedStep
from megatron_eqlen.report.rollouts import RolloutView, by_token

BEFORE = 80
"""Characters of the part before that are printed with a part."""
STYLES = {"raised": "green", "lowered": "red", "equal": "yellow", "plain": "default"}


def print_rollouts(
    streams: Path, model: Path, limit: int = 5, recipe: Recipe | None = None, console: Console | None = None
) -> None:
    """Print the first ``limit`` rollouts of a file, of a step's folder, or of a run's ``streams/`` folder.

    ``model`` is the folder whose tokenizer decodes. ``recipe``, by default that of the recorded run, gives
    the lessons of training. Raises ValueError naming the path if there is nothing to read.
    """
    console = console or Console(highlight=False)
    recipe = recipe or recipe_of(streams)
    if recipe is None:
        console.print(f"{streams}: no run's recipe.yaml above it: what was trained is not known\n")
    decode = by_token(load_decoder(model))
    steps = recorded_steps(streams)
    if not steps:
        kind = "neither" if streams.is_dir() else "no such file or folder"
        raise ValueError(
            f"{streams}: expected a .arrow file, or a folder with {FILES} or step-*/{FILES}, found {kind}"
        )
    left = limit
    for name, files in steps:
        step = RecordedStep(files, recipe)
        if step.rollouts and streams.is_dir():
            console.rule(name, characters="─")
        shown = step.rollouts[:left]
        for rollout in step.views(shown, decode):
            _print(console, rollout)
        left -= len(shown)
        if not left:
            return
    if left == limit:
        raise ValueError(f"{streams}: expected at least one recorded rollout, found none")


def recipe_of(streams: Path) -> Recipe | None:
    """Return the recipe of the run or harvest that recorded ``streams`` (as for ``print_rollouts``).

    The recipe lies beside the steps, or beside the folder ``streams/`` that holds them.
    """
    here = streams.resolve()
    for folder in (here, *here.parents):
        recorded = (folder / "streams").is_dir() or any(folder.glob(f"step-*/{FILES}"))
        if recorded and (folder / RECIPE).is_file():
            return load(folder / RECIPE)
    return None


def _print(console: Console, rollout: RolloutView) -> None:
    console.print(Text.assemble((rollout.prompt_id, "bold"), "  ", rollout.title))
    if rollout.question:
        console.print(Padding(Text(rollout.question, "italic"), (0, 0, 0, 2)))
    for part in rollout.parts:
        style = STYLES[part.lesson.role]
        console.print(Text.assemble("  ", (part.label, f"bold {style}"), "  ", ", ".join(part.facts())))
        before = rollout.parts[part.parent].text[-BEFORE:] if part.parent >= 0 else ""
        text = Text.assemble((f"…{before}▸" if before else "", "dim"), (part.text, style))
        console.print(Padding(text, (0, 0, 0, 4)))
    console.print()
