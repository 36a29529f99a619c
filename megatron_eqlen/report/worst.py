"""The token of a step about which trainer and engine disagree most, located among the step's rollouts.

It is kept beside them: ``streams/step-00000012/worst.json``.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_eqlen.files import expecting, read_json, write_text
from megatron_eqlen.objectives.registry import resolve
from megatron_eqlen.objectives.units import comparison_units
from megatron_eqlen.recipe import Recipe
from megatron_eqlen.sampling import kind_of
from megatron_eqlen.sampling.kind import LabeledSegment
from megatron_eqlen.tokens import TokenIds, join
from megatron_eqlen.types import Rollout, WorstToken

FILE = "worst.json"


@dataclass(frozen=True)
class Place:
    """Location of the token."""

    rollout: Rollout
    title: str
    placed: LabeledSegment
    token: int
    """Index in the segment's tokens; below 0 in the prefix that its node repeats."""

    def __str__(self) -> str:
        number = f"token {self.token} of {len(self.placed.segment)}"
        return f"{self.rollout.prompt_id}, {self.title}: {number} of {self.placed.label}"

    def around(self, tokens: int) -> tuple[TokenIds, TokenIds, TokenIds]:
        """Return up to ``tokens`` tokens of its path before it, the token itself, and up to ``tokens`` after
        it."""
        path = join([self.placed.inherited, self.placed.segment.token_ids])
        at = len(self.placed.inherited) + self.token
        return path[max(0, at - tokens) : at], path[at : at + 1], path[at + 1 : at + 1 + tokens]


def find(worst: WorstToken, rollouts: Sequence[Rollout], recipe: Recipe) -> Place:
    """Return its place among ``rollouts`` (skeletons suffice), found with the functions of training."""
    for rollout in rollouts:
        if not worst.tree.startswith(rollout.prompt_id):
            continue
        tree, units = comparison_units(rollout, recipe, resolve(recipe))
        if tree.name != worst.tree:
            continue
        node, picture = tree.nodes[worst.node], kind_of(rollout).picture(rollout)
        members = (pair for unit in units for pair in zip(unit.members, unit.nodes, strict=True))
        segment = next(segment for segment, its_node in members if its_node is node)
        every = [*picture.segments, *(side for pair in picture.pairs for side in pair)]
        placed = next(candidate for candidate in every if candidate.segment is segment)
        return Place(rollout, picture.title, placed, worst.token - (len(node) - len(segment)))
    raise ValueError(f"token tree {worst.tree!r}: expected it among the step's rollouts, found none")


def write(folder: Path, worst: WorstToken) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / FILE, json.dumps(worst._asdict()))


def read(folder: Path) -> WorstToken | None:
    """Read the token; None if the step took no update, or is of an earlier version."""
    path = folder / FILE
    if not path.is_file():
        return None
    with expecting("a token", path):
        return WorstToken(**read_json(path))
