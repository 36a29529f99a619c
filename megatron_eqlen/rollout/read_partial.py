"""Partial rollouts read from the record of the step that suspended them (``rollout.carry_over``)."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

from megatron_eqlen.files import step_name
from megatron_eqlen.recipe import Recipe
from megatron_eqlen.rollout.harvest import harvest_seed
from megatron_eqlen.rollout.partial import PartialRollout, RolloutOrigin
from megatron_eqlen.rollout.record import journal
from megatron_eqlen.rollout.record.reader import read_step
from megatron_eqlen.rollout.record.recorder import SUSPENDED
from megatron_eqlen.sampling.track import rollout_of
from megatron_eqlen.types import Rollout, RolloutKey, Segment, rollout_key


class PartialRolloutError(ValueError):
    """A suspended rollout is not recorded; names the folder, what was expected and what was found."""


def read_partial_rollouts(
    streams: Path, step: int, suspended: Mapping[RolloutKey, RolloutOrigin], recipe: Recipe
) -> list[PartialRollout]:
    """Return the ``suspended`` rollouts that ``step`` resumes, as the step before recorded them under
    ``streams``. Raises PartialRolloutError if one of them is not there."""
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
        PartialRollout(
            rollouts[key],
            tracks[key],
            journals.prompt_routes.get(key),
            seed=harvest_seed(recipe, origin.step),
            oldest_version=origin.oldest_version,
            age=step - origin.step,
            last_step=step - origin.step >= recipe.rollout.max_staleness,
        )
        for key, origin in suspended.items()
    ]


def _read_suspended(
    folder: Path, wanted: Collection[RolloutKey], prompt_ids: Collection[str]
) -> dict[RolloutKey, Rollout]:
    """Return the finished parts of the ``wanted`` rollouts, graded."""
    found = {rollout_key(rollout): rollout for rollout in read_step(folder, prompt_ids) if rollout.suspended}
    if missing := [key for key in wanted if key not in found]:
        (prompt_id, index), found_ = missing[0], len(wanted) - len(missing)
        raise PartialRolloutError(
            f"{folder}: expected {len(wanted)} suspended rollouts, which this step resumes, found "
            f"{found_} of them: {prompt_id}/{index} is missing; go back to an earlier checkpoint, or start a "
            f"new run from its weights (model.path)"
        )
    return found
