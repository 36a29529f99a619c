"""A few scored rollouts of a step for trackers: a row for each segment, a pair's two sides together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron_eqlen.recipe import Recipe
from megatron_eqlen.report.format import shorten
from megatron_eqlen.report.rollouts import Decode, RolloutView, Training, view
from megatron_eqlen.tokens import Placeholder
from megatron_eqlen.types import Rollout

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
        rows = []
        for shown in self.rollouts:
            about = [self.step, shown.prompt_id, shorten(shown.question), shown.title]
            for one in shown.all_segments():
                effect = [one.reward, one.advantage, one.use, one.verdict, one.end]
                origin = [one.length, one.inherited, ", ".join(map(str, one.versions))]
                rows.append([*about, one.label, shorten(one.text), *effect, *origin])
        return rows

    def markdown(self) -> str:
        """Return the samples as a text to be read from top to bottom."""
        parts = []
        for rollout in self.rollouts:
            parts += [f"### {rollout.prompt_id}, {rollout.title}", _quoted(rollout.question)]
            for segment in rollout.all_segments():
                facts = [*segment.facts(), *([segment.use] if segment.use else [])]
                parts += [f"**{segment.label}** · {' · '.join(facts)}", _quoted(segment.text)]
        return "\n\n".join(parts)


def samples(step: int, rollouts: Sequence[Rollout], recipe: Recipe, decode: Decode) -> Samples:
    """Return samples of the ``rollouts`` that ``step`` trains, of those whose tokens this rank holds: of
    different prompts, first those that teach something."""
    training = Training(rollouts, recipe, selected=True)
    here = [rollout for rollout in rollouts if not _is_bare(rollout)]
    return Samples(step, [view(rollout, decode, training) for rollout in training.telling(here)])


def _is_bare(rollout: Rollout) -> bool:
    return any(isinstance(part.token_ids, Placeholder) for part in rollout.parts)


def _quoted(text: str) -> str:
    """Return the text as a block of code, whatever its content."""
    return "\n".join(f"    {line}" for line in shorten(text).splitlines())
