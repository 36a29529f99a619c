"""Recorded rollouts on the terminal: ``eqlen inspect``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from megatron_eqlen.hf.tokenizer import load_decoder
from megatron_eqlen.job import Job
from megatron_eqlen.recipe import Recipe
from megatron_eqlen.recipe.load import RECIPE, load
from megatron_eqlen.record.reader import recorded_steps
from megatron_eqlen.record.recorder import FILES
from megatron_eqlen.report.probe import probes_of, response_lines
from megatron_eqlen.report.recorded import RecordedStep
from megatron_eqlen.report.rollouts import RolloutView, by_token
from megatron_eqlen.types import Rollout

BEFORE = 80
"""Characters of the part before that are printed with a part."""
ESCAPES = {code: f"\\x{code:02x}" for code in (*range(9), *range(11, 32), *range(127, 160))}
"""How control characters are printed: a terminal would obey them."""
STYLES = {"raised": "green", "lowered": "red", "equal": "yellow", "plain": "default"}


def print_rollouts(
    streams: Path, model: Path, limit: int, recipe: Recipe | None, console: Console, as_json: bool = False
) -> None:
    """Print the first ``limit`` rollouts of a file, of a step's folder, or of a run's ``streams/`` folder,
    probed ones first within a step; with ``as_json`` a line of JSON for each.

    ``model``: the folder whose tokenizer decodes. ``recipe``, if known, gives the lessons of training.
    Raises ValueError naming the path if there is nothing to read.
    """
    if recipe is None:
        console.print(f"{streams}: no run's recipe.yaml above it: what was trained is not known\n")
    decode, job = by_token(load_decoder(model)), recipe and Job(recipe)
    if not (steps := recorded_steps(streams)):
        expected = f"a .arrow file, or a folder with {FILES} or step-*/{FILES}"
        kind = "neither" if streams.is_dir() else "no such file or folder"
        raise ValueError(f"{streams}: expected {expected}, found {kind}")
    left = limit
    for name, files in steps:
        step = RecordedStep(files, job)
        if step.rollouts and streams.is_dir() and not as_json:
            console.rule(name, characters="─")
        probes = probes_of(files[0].resolve().parent)
        # a stable sort: otherwise in the order of the record
        shown = sorted(step.rollouts, key=lambda rollout: rollout.key not in probes)[:left]
        for rollout, seen in zip(shown, step.views(shown, decode), strict=True):
            probed = probes.get(rollout.key, [])
            if as_json:
                print(json.dumps(_as_json(name, rollout, seen, probed), ensure_ascii=False))
            else:
                _print(console, seen, probed)
        left -= len(shown)
        if not left:
            return
    if left == limit:
        files = ", ".join(f"{file.name} of {file.stat().st_size} bytes" for _, step in steps for file in step)
        raise ValueError(f"{streams}: expected at least one recorded rollout, found none in {files:.300}")


def recipe_of(streams: Path) -> Recipe | None:
    """Return the recipe of the run or harvest that recorded ``streams``, from beside or above the steps."""
    here = streams.resolve()
    for folder in (here, *here.parents):
        recorded = (folder / "streams").is_dir() or any(folder.glob(f"step-*/{FILES}"))
        if recorded and (folder / RECIPE).is_file():
            return load(folder / RECIPE)
    return None


def _as_json(step: str, rollout: Rollout, seen: RolloutView, probed: list[dict[str, Any]]) -> dict[str, Any]:
    parts = [
        {"label": part.label, "parent": part.parent, "text": part.text, "facts": part.facts()}
        for part in seen.parts
    ]
    named = {"step": step, "prompt_id": rollout.prompt_id, "index": rollout.index, "title": seen.title}
    return named | {"question": seen.question, "parts": parts, "probed": probed}


def _print(console: Console, rollout: RolloutView, probed: Sequence[dict[str, Any]]) -> None:
    console.print(Text.assemble((rollout.prompt_id, "bold"), "  ", rollout.title))
    if rollout.question:
        console.print(Padding(_text((rollout.question, "italic")), (0, 0, 0, 2)))
    for part in rollout.parts:
        style = STYLES[part.lesson.role]
        console.print(_text((f"  {part.label}", f"bold {style}"), ("  " + ", ".join(part.facts()), "")))
        # the end of the text that the part continues
        before = rollout.parts[part.parent].text[-BEFORE:] if part.parent >= 0 else ""
        text = _text((f"…{before}▸" if before else "", "dim"), (part.text, style))
        console.print(Padding(text, (0, 0, 0, 4)))
    for response in probed:
        title, *rows = response_lines(response)
        texts = [(stretch["text"], _shade(*stretch["change"])) for stretch in response["stretches"]]
        console.print(Text.assemble("  ", ("probed", "bold"), f"  {title}"))
        console.print(Padding(_text(*texts), (0, 0, 1, 4)))
        console.print(Text("\n".join(rows)))
    console.print()


def _text(*pieces: tuple[str, str]) -> Text:
    """Return pieces of text, each with its style."""
    return Text.assemble(*((text.translate(ESCAPES), style) for text, style in pieces))


def _shade(change: float, low: float, high: float) -> str:
    """Return the style of text that changed the value; what is not sure is dim."""
    colour = "green" if change > 0 else "red" if change < 0 else "default"
    return f"{'bold' if low > 0 or high < 0 else 'dim'} {colour}"
