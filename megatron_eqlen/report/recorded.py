"""A recorded step: which of its rollouts teach, take long, or got a certain verdict.

Skeletons are read once; token ids are read only of the rollouts that are shown.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from megatron_eqlen.files import step_folders, step_number
from megatron_eqlen.hf.tokenizer import load_tokenizer
from megatron_eqlen.recipe import ModelRecipe, Recipe
from megatron_eqlen.recipe.inputs import local_path
from megatron_eqlen.report.rollouts import MATH, Decode, RolloutView, Training, gold_answer, view
from megatron_eqlen.rollout.record.reader import fill_numbers, read_prompts, read_skeletons, step_files
from megatron_eqlen.rollout.record.recorder import GRADE_FILES
from megatron_eqlen.sampling import kind_of
from megatron_eqlen.sampling.kind import LabeledSegment
from megatron_eqlen.types import Grade, Rollout, RolloutKey, rollout_key

SHOWN = 4
"""Number of a step's rollouts on a page."""
SLOWEST = 8


@dataclass(frozen=True)
class Graded:
    """A response's grade and its last segment."""

    rollout: RolloutKey
    label: str
    """Label of the segment that ends the response."""
    length: int
    """Number of tokens of the response."""
    grade: Grade
    gold: str = ""
    """The gold answer, if asked for and if the problem has one."""


@dataclass(frozen=True)
class Slow:
    """A prompt by the longest of its paths; paths are decoded side by side, token after token."""

    prompt_id: str
    question: str
    rollout: RolloutKey
    """Rollout with the longest path."""
    longest: int
    """Number of tokens of this path."""
    generated: int
    """Number of tokens of all the prompt's rollouts."""
    grading: float
    """Seconds spent in graders."""
    reward: float | None
    """Mean reward over its responses that ended, None if none did."""


def recorded(streams: Path, newest_first: bool = False) -> Iterator[Path]:
    """Yield the folders of the steps that hold rollouts."""
    folders = sorted(step_folders(streams), reverse=newest_first)
    return (folder for _, folder in folders if step_files(folder))


def is_scored(folder: Path) -> bool:
    """Return True if the grades of a step are recorded; they are written after its harvest."""
    return any(folder.glob(GRADE_FILES))


class Decoder(NamedTuple):
    """The part of a model's tokenizer that pages use."""

    decode: Decode
    eos_token_ids: frozenset[int] = frozenset()
    """End-of-sequence tokens; empty if unknown."""
    note: str = ""
    """Why token ids are shown instead of text; empty if text is shown."""


def find_decoder(model: ModelRecipe) -> Decoder:
    """Return the decoder of the model's tokenizer; if there is none, one that prints token ids."""
    try:
        tokenizer = load_tokenizer(local_path(model))
    except ValueError as error:
        note = f"Token ids instead of text: {error}"
        return Decoder(lambda token_ids: " ".join(map(str, token_ids)), note=note)
    return Decoder(tokenizer.decode, tokenizer.eos_token_ids)


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
        return self._as_text([*by_prompt.values()][:SHOWN], decode)

    def view(self, key: RolloutKey, decode: Decode) -> RolloutView:
        """Return one rollout as text. Raises ValueError if the step has none with this key."""
        found = [rollout for rollout in self.rollouts if rollout_key(rollout) == key]
        if not found:
            raise ValueError(f"{self.folder}: expected rollout {key[1]} of {key[0]!r}, found none")
        return self._as_text(found, decode)[0]

    def graded(self, with_golds: bool = False) -> list[Graded]:
        """Return all responses with a grade."""
        has_golds = with_golds and any(rollout.prompt.grader == MATH for rollout in self.rollouts)
        prompts = read_prompts(self._files) if has_golds else []
        golds = {prompt.prompt_id: gold_answer(prompt) for prompt in prompts}
        return [
            Graded(
                rollout_key(rollout),
                placed.label,
                _end(placed),
                placed.segment.grade,
                golds.get(rollout.prompt_id, ""),
            )
            for rollout in self.rollouts
            for placed in _placed(rollout)
            if placed.segment.grade is not None
        ]

    def slowest(self) -> list[Slow]:
        """Return the prompts with the longest paths, the longest first."""
        by_prompt: dict[str, list[Rollout]] = {}
        for rollout in self.rollouts:
            by_prompt.setdefault(rollout.prompt_id, []).append(rollout)
        every = [_slow(rollouts) for rollouts in by_prompt.values()]
        return sorted(every, key=lambda prompt: -prompt.longest)[:SLOWEST]

    def _as_text(self, rollouts: Sequence[Rollout], decode: Decode) -> list[RolloutView]:
        fill_numbers(rollouts, self._files)
        return [view(rollout, decode, self.training) for rollout in rollouts]

    def _teaches(self, rollout: Rollout) -> bool:
        return any(self.training.of(segment).role in ("raised", "lowered") for segment in rollout.segments())


def _slow(rollouts: Sequence[Rollout]) -> Slow:
    longest, key = max((_longest(rollout), rollout_key(rollout)) for rollout in rollouts)
    grades = [s.grade for rollout in rollouts for s in rollout.segments() if s.grade is not None]
    return Slow(
        key[0],
        rollouts[0].prompt.question,
        key,
        longest,
        sum(len(segment) for rollout in rollouts for segment in rollout.segments()),
        sum(grade.seconds for grade in grades),
        fmean(grade.reward for grade in grades) if grades else None,
    )


def _longest(rollout: Rollout) -> int:
    return max((_end(placed) for placed in _placed(rollout)), default=0)


def _end(placed: LabeledSegment) -> int:
    """Return the number of tokens from the prompt to the segment's end."""
    return len(placed.inherited) + len(placed.segment)


def _placed(rollout: Rollout) -> list[LabeledSegment]:
    picture = kind_of(rollout).picture(rollout)
    return [*(side for pair in picture.pairs for side in pair), *picture.segments]
