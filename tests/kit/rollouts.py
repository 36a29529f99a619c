"""Rollouts of each kind, made of parts without places, which these functions number and link."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from megatron_eqlen.job import Job
from megatron_eqlen.objectives.build import build_minibatches
from megatron_eqlen.recipe import Recipe
from megatron_eqlen.record.recorder import Recorder, record_grades
from megatron_eqlen.types import Metrics, Outcome, Part, Prompt, Rollout, TokenTree


def place(part: Part, role: str, number: int, parent: int) -> Part:
    part.role, part.number, part.parent = role, number, parent
    return part


def stream(
    prompt: Prompt, index: int, policy_version: int, pairs: Iterable[tuple[Part, Part]], outcome: Outcome,
    tail: Part | None = None, **others: Any,
) -> Rollout:  # fmt: skip
    """Return the stream of these pairs (A, B), with the tail of its trunk if any."""
    parts: list[Part] = []
    for a, b in pairs:
        trunk = len(parts) - 1
        parts += [place(a, "a", trunk + 1, trunk), place(b, "b", trunk + 2, trunk)]
    if tail is not None:
        parts.append(place(tail, "tail", len(parts), len(parts) - 1))
    return Rollout(prompt, index, "equal_length", policy_version, parts, outcome, **others)


def group(
    prompt: Prompt, policy_version: int, completions: Sequence[Part], index: int = 0,
    numbers: Iterable[int] | None = None, outcome: Outcome = "complete", **others: Any,
) -> Rollout:  # fmt: skip
    """Return the group of these completions, numbered 0, 1, ... by default."""
    numbers = range(len(completions)) if numbers is None else numbers
    parts = [place(part, "completion", n, -1) for n, part in zip(numbers, completions, strict=True)]
    return Rollout(prompt, index, "independent", policy_version, parts, outcome, **others)


def tree(
    prompt: Prompt, policy_version: int, steps: Sequence[Part], parents: Sequence[int],
    numbers: Sequence[int] | None = None, outcome: Outcome = "complete", **others: Any,
) -> Rollout:  # fmt: skip
    """Return the tree of these steps. ``parents``: index in ``steps`` of each one's parent, or -1."""
    numbers = range(len(steps)) if numbers is None else numbers
    above = [numbers[parent] if parent >= 0 else -1 for parent in parents]
    parts = [place(part, "step", *at) for part, *at in zip(steps, numbers, above, strict=True)]
    return Rollout(prompt, 0, "tree", policy_version, parts, outcome, **others)


def build_trees(rollouts: Sequence[Rollout], recipe: Recipe) -> tuple[list[TokenTree], Metrics]:
    """Return the forest of the only optimizer step of ``rollouts``, and metrics."""
    (trees,), metrics = build_minibatches(rollouts, Job(recipe))
    return trees, metrics


def record(path: Path, rollouts: Sequence[Rollout]) -> None:
    """Record rollouts that are complete, with their grades."""
    with Recorder(path) as recorder:
        for rollout in rollouts:
            recorder.write(rollout)
    record_grades(path, rollouts)
