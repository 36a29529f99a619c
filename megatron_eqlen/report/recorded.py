"""Recorded steps: whether their records are whole, their verdicts, and the rollouts that teach.

Skeletons are read once; token ids are read only of the rollouts that are shown.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from megatron_eqlen.hf.tokenizer import load_decoder
from megatron_eqlen.objectives.advice import Profile, advice
from megatron_eqlen.recipe import ModelRecipe, Recipe
from megatron_eqlen.recipe.inputs import local_path
from megatron_eqlen.report.rollouts import Decode, RolloutView, Training, view
from megatron_eqlen.rollout.record.reader import (
    check_file,
    fill_numbers,
    read_skeletons,
    scored_steps,
    step_files,
)
from megatron_eqlen.types import Node, Part, Rollout

PROFILED = 8
"""Number of newest steps whose rollouts give advice."""


class TextDecoder(NamedTuple):
    """The part of a model's tokenizer that pages use."""

    decode: Decode
    note: str = ""
    """Why token ids are shown instead of text; empty if text is shown."""


def find_decoder(model: ModelRecipe) -> TextDecoder:
    """Return the decoder of the model's tokenizer; if there is none, one that prints token ids."""
    try:
        return TextDecoder(load_decoder(local_path(model)))
    except ValueError as error:
        note = f"Token ids instead of text: {error}"
        return TextDecoder(lambda token_ids: " ".join(map(str, token_ids)), note=note)


def recorded_advice(run: Path, recipe: Recipe) -> tuple[Profile | None, str]:
    """Return what the newest steps in the folder of a run or harvest advise (``objectives/advice.py``)."""
    streams = run / "streams" if (run / "streams").is_dir() else run
    newest = islice(scored_steps(streams, newest_first=True), PROFILED)
    rollouts = [rollout for _, folder in newest for rollout in read_skeletons(step_files(folder))]
    scored = [
        rollout
        for rollout in rollouts
        if not rollout.suspended and all(part.grade for part in rollout.parts if part.finish_reason == "stop")
    ]
    return advice(scored, recipe) if scored else (None, "")


class RecordedStep:
    """The rollouts in some of a step's ``files``. Raises ValueError naming a file that is damaged."""

    def __init__(self, files: Sequence[Path], recipe: Recipe | None) -> None:
        for path in files:
            check_file(path)
        self._files, self.rollouts = files, read_skeletons(files)
        self._training = Training(self.rollouts, recipe)

    def telling(self, decode: Decode) -> list[RolloutView]:
        """Return a few rollouts of different prompts as text, first those with unequal rewards."""
        return self.views(self._training.telling(self.rollouts), decode)

    def views(self, rollouts: Sequence[Rollout], decode: Decode) -> list[RolloutView]:
        """Return some of ``rollouts`` as text."""
        fill_numbers(rollouts, self._files)
        return [view(rollout, decode, self._training) for rollout in rollouts]

    def node_of(self, part: Part) -> Node | None:
        """Return the node that trained a part, with its advantage and weight; None: not compared."""
        return self._training.node_of(part)

    def verdicts(self) -> list[tuple[str, int]]:
        """Return the verdicts of all its responses with their numbers, the most frequent first."""
        grades = [part.grade for rollout in self.rollouts for part in rollout.parts]
        return Counter(grade.verdict for grade in grades if grade is not None).most_common()
