"""A few scored rollouts of a step as a table: a row for each segment, a pair's two sides together."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_eqlen.recipe import Recipe
from megatron_eqlen.report.format import shorten
from megatron_eqlen.report.recorded import Recorded, is_scored
from megatron_eqlen.report.rollouts import Decode, RolloutView, SegmentView

COLUMNS = (
    "step", "prompt", "question", "rollout", "segment", "text", "reward", "advantage", "use", "verdict",
    "end", "tokens", "inherited_tokens", "policy_versions",
)  # fmt: skip


@dataclass(frozen=True)
class Samples:
    """Samples of ``step``, counted from 1."""

    step: int
    rollouts: list[RolloutView]

    def rows(self) -> list[list[Any]]:
        """Return a row of ``COLUMNS`` for each segment; long texts are shortened, as in the report."""
        return [
            [self.step, rollout.prompt_id, shorten(rollout.question), rollout.title, *_cells(segment)]
            for rollout in self.rollouts
            for segment in rollout.all_segments()
        ]

    def markdown(self) -> str:
        """Return the samples as a text to be read from top to bottom."""
        parts = []
        for rollout in self.rollouts:
            parts += [f"### {rollout.prompt_id}, {rollout.title}", _quoted(rollout.question)]
            for segment in rollout.all_segments():
                facts = [*segment.facts(), *([segment.use] if segment.use else [])]
                parts += [f"**{segment.label}** · {' · '.join(facts)}", _quoted(segment.text)]
        return "\n\n".join(parts)


def samples(folder: Path, recipe: Recipe, decode: Decode) -> Samples | None:
    """Return samples of the step recorded in ``folder``: rollouts of different prompts, first those that
    teach something. None if nothing is recorded, as with ``--replay``."""
    if not is_scored(folder):
        return None
    step = Recorded(folder, recipe)
    return Samples(step.step, step.views(decode))


def _cells(segment: SegmentView) -> list[Any]:
    return [
        segment.label,
        shorten(segment.text),
        segment.reward,
        segment.advantage,
        segment.use,
        segment.verdict,
        segment.end,
        segment.length,
        segment.inherited,
        ", ".join(map(str, segment.versions)),
    ]


def _quoted(text: str) -> str:
    """Return the text as a block of code, whatever its content."""
    return "\n".join(f"    {line}" for line in shorten(text).splitlines())
