"""Rollouts that one step suspends and the next takes up (``rollout.carry_over``).

    step n                                                   step n + 1
    budget spent ─► what is final: record (``suspended``) ─► ``Carried`` ─► its tracks start with their
                 └► tokens of all its tracks: a file ──────┘    tokens, the harvester cuts the same parts

A harvest is a function of its tracks' tokens, so these are all that goes on, as after a kill. What was final
keeps its grade and is marked ``Segment.carried``: it is neither graded nor trained again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from megatron_eqlen.files import step_name
from megatron_eqlen.recipe import Recipe
from megatron_eqlen.rollout import journal
from megatron_eqlen.rollout.harvest import harvest_seed
from megatron_eqlen.rollout.left import Carried
from megatron_eqlen.rollout.record_reader import read_step
from megatron_eqlen.rollout.recorder import SUSPENDED
from megatron_eqlen.sampling import kind_of
from megatron_eqlen.sampling.track import rollout_of
from megatron_eqlen.types import Rollout, RolloutKey, Segment, rollout_key


class Drawn(NamedTuple):
    """The step that drew a rollout's prompt."""

    step: int
    oldest_version: int = 0
    """Of the weights that may have sampled its tokens: then, and so ever after."""


class CarriedError(ValueError):
    """What a step suspended is not there; names the folder, what was expected and what was found."""


def recall(carried: Iterable[Carried], rollouts: Iterable[Rollout]) -> None:
    """``Carried.recall`` for those of ``rollouts`` that were carried."""
    by_key = {rollout_key(one.rollout): one for one in carried}
    for rollout in rollouts:
        if rollout_key(rollout) in by_key:
            by_key[rollout_key(rollout)].recall(kind_of(rollout).parts(rollout))


def open_prompts(suspended: Iterable[Rollout], recipe: Recipe) -> float:
    """How many prompts would begin with as many tracks as are open in ``suspended``."""
    shares = (kind_of(one).open_share(one, recipe) for one in suspended)
    return sum(shares) / recipe.rollouts_per_prompt


def take_up(streams: Path, step: int, suspended: Mapping[RolloutKey, Drawn], recipe: Recipe) -> list[Carried]:
    """What ``step`` goes on with: ``suspended``, as the step before left them under ``streams``. Raises
    CarriedError if one of them is not there."""
    if not suspended:
        return []
    folder, prompt_ids = streams / step_name(step - 1), {prompt_id for prompt_id, _ in suspended}
    rollouts = _read_suspended(folder, suspended, prompt_ids)
    journals = journal.read_journals(sorted(folder.glob(SUSPENDED)), prompt_ids)
    tracks: dict[RolloutKey, dict[str, Segment]] = {key: {} for key in suspended}
    for name, known in journals.tracks.items():
        if rollout_of(name) in tracks:
            tracks[rollout_of(name)][name] = known
    return [
        Carried(
            rollouts[key],
            tracks[key],
            journals.prompt_routes.get(key),
            seed=harvest_seed(recipe, drawn.step),
            oldest_version=drawn.oldest_version,
            age=step - drawn.step,
            ends=step - drawn.step >= recipe.rollout.max_staleness,
        )
        for key, drawn in suspended.items()
    ]


def _read_suspended(
    folder: Path, wanted: Collection[RolloutKey], prompt_ids: Collection[str]
) -> dict[RolloutKey, Rollout]:
    """What was final of the ``wanted`` rollouts, graded."""
    found = {rollout_key(one): one for one in read_step(folder, prompt_ids) if one.suspended}
    if missing := [key for key in wanted if key not in found]:
        (prompt_id, index), found_ = missing[0], len(wanted) - len(missing)
        raise CarriedError(
            f"{folder}: expected {len(wanted)} suspended rollouts, which this step goes on with, found "
            f"{found_} of them: {prompt_id}/{index} is missing; go back to an earlier checkpoint, or start a "
            f"new run from its weights (model.path)"
        )
    return found
