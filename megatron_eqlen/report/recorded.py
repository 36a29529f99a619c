"""A recorded step: its verdicts, and the rollouts that teach.

Skeletons are read once; token ids are read only of the rollouts that are shown.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from megatron_eqlen.files import step_folders, step_number
from megatron_eqlen.hf.tokenizer import load_decoder
from megatron_eqlen.recipe import ModelRecipe, Recipe
from megatron_eqlen.recipe.inputs import local_path
from megatron_eqlen.report.rollouts import Decode, RolloutView, Training, view
from megatron_eqlen.rollout.record.reader import fill_numbers, read_skeletons, step_files
from megatron_eqlen.rollout.record.recorder import GRADE_FILES
from megatron_eqlen.types import Rollout

SHOWN = 4
"""Number of a step's rollouts on a page."""


def recorded(streams: Path, newest_first: bool = False) -> Iterator[Path]:
    """Yield the folders of the steps that hold rollouts."""
    folders = sorted(step_folders(streams), reverse=newest_first)
    return (folder for _, folder in folders if step_files(folder))


def is_scored(folder: Path) -> bool:
    """Return True if the grades of a step are recorded; they are written after its harvest."""
    return any(folder.glob(GRADE_FILES))


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


class Recorded:
    """The rollouts in a step's ``folder``."""

    def __init__(self, folder: Path, recipe: Recipe) -> None:
        self.folder, self.name = folder, folder.name
        number = step_number(folder.name)
        assert number is not None, folder
        self.step = number + 1
        """Number of the step, counted from 1."""
        self._recipe, self._files = recipe, step_files(folder)
        self.rollouts = read_skeletons(self._files)

    @cached_property
    def training(self) -> Training:
        return Training(self.rollouts, self._recipe)

    def views(self, decode: Decode) -> list[RolloutView]:
        """Return a few rollouts of different prompts as text, first those with unequal rewards."""
        by_prompt: dict[str, Rollout] = {}
        for rollout in sorted(self.rollouts, key=lambda rollout: not self._teaches(rollout)):
            by_prompt.setdefault(rollout.prompt_id, rollout)
        shown = [*by_prompt.values()][:SHOWN]
        fill_numbers(shown, self._files)
        return [view(rollout, decode, self.training) for rollout in shown]

    def verdicts(self) -> list[tuple[str, int]]:
        """Return the verdicts of all its responses with their numbers, the most frequent first."""
        grades = [part.grade for rollout in self.rollouts for part in rollout.parts]
        return Counter(grade.verdict for grade in grades if grade is not None).most_common()

    def _teaches(self, rollout: Rollout) -> bool:
        return any(self.training.of(part).role in ("raised", "lowered") for part in rollout.parts)
