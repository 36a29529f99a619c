"""Checks, before anything is trained, that recorded rollouts fit the recipe that replays them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from megatron_eqlen.files import step_name
from megatron_eqlen.recipe import Recipe
from megatron_eqlen.record.reader import has_columns
from megatron_eqlen.record.recorder import FILES
from megatron_eqlen.tokens import COLUMNS
from megatron_eqlen.types import Rollout


class ReplayError(ValueError):
    """A record that cannot stand in for an engine; names the folder, what was expected and what was found."""


def check_steps(streams: Path, first: int, steps: int | None) -> None:
    """Raise ReplayError unless steps ``first`` (counted from 0) to ``steps - 1`` are recorded."""
    recorded = {folder.name for folder in streams.glob("step-*") if any(folder.glob(FILES))}
    wanted = [step_name(number) for number in range(first, max(first + 1, steps or 0))]
    if missing := [name for name in wanted if name not in recorded]:
        stored = f"{len(recorded)} steps, {min(recorded)} to {max(recorded)}" if recorded else "no step"
        found = f"found {stored}: {missing[0]} is missing"
        raise ReplayError(f"{streams}: expected {wanted[0]} to {wanted[-1]}, {found}")


def check_step(folder: Path, rollouts: Sequence[Rollout], recipe: Recipe, redraws: bool) -> None:
    """Raise ReplayError unless a step's rollouts are those that ``recipe`` would generate for their prompts.
    ``redraws``: it draws prompts until enough of them have unequal rewards."""
    kinds = Counter(recorded.kind for recorded in rollouts)
    if set(kinds) != {recipe.sampling}:
        _refuse(folder, f"rollouts of sampling: {recipe.sampling}", " and ".join(kinds) or "none")
    missing = [name for name in recipe.rollout.columns if not all(has_columns(r, [name]) for r in rollouts)]
    if missing:
        column = COLUMNS[missing[0]]
        keys = (f"rollout.{key}" for key in (column.keep_key, column.record_key) if key)
        lost = f"found tokens without: its run did not keep or record them ({', '.join(keys)})"
        way = f"change rollout.{column.keep_key} to train without"
        raise ReplayError(f"{folder}: expected {column.name} of all tokens, {lost}; {way}")
    prompts = Counter(recorded.prompt_id for recorded in rollouts)
    if recipe.rollout.carry_over:
        return  # the number of resumed rollouts depends on the step before
    # a budget leaves out prompts and rollouts that had not begun when it was used up
    wanted, rollout = recipe.data.prompts_per_step, recipe.rollout
    cut = rollout.tokens_per_step is not None or recipe.environment.name is not None
    too_many = len(prompts) > wanted and not redraws
    if too_many or (len(prompts) < wanted and not cut):
        _refuse(folder, f"rollouts of {wanted} prompts (data.prompts_per_step)", str(len(prompts)))
    each = recipe.rollouts_per_prompt
    for prompt_id, count in prompts.items():
        if count > each or (count < each and not cut):
            what = f"{each} rollouts of every prompt (group_size {recipe.group_size})"
            _refuse(folder, what, f"{count} of {prompt_id}")


def _refuse(folder: Path, expected: str, found: str) -> None:
    why = "the record is of another recipe, or was cut short"
    raise ReplayError(f"{folder}: expected {expected}, found {found}: {why}")
