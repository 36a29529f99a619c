"""Readers of the files of ``recorder``: rollouts, with tokens or as skeletons, and those to resume."""

from __future__ import annotations

import json
import logging
import os
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import MappingProxyType

import numpy as np

from megatron_eqlen.files import step_name, step_number, unused
from megatron_eqlen.recipe import Recipe
from megatron_eqlen.record.arrow_log import batches, is_closed, values
from megatron_eqlen.record.format import (
    COUNTS,
    GRADES,
    KEY,
    NOTE_KEY,
    SEGMENTS,
    SKELETON,
    Assembly,
    GradeKey,
    cells,
    from_batch,
)
from megatron_eqlen.record.partial import HarvestProgress, PartialRollout, RolloutOrigin
from megatron_eqlen.record.recorder import FILES, GRADE_FILES, OPEN, OPEN_FILES
from megatron_eqlen.tokens import COLUMNS, GIVEN, NUMBERS, TEACHER, VERSIONS, Tokens
from megatron_eqlen.types import Grade, Prompt, Rollout, RolloutKey, training_order

CHECKED_STEPS, CHECKED_BYTES = 10, 64e6
"""Newest steps whose records ``check_newest`` reads, and about how many bytes of them."""

logger = logging.getLogger(__name__)


class PartialRolloutError(ValueError):
    """A suspended rollout is not recorded; names the folder, what was expected and what was found."""


def read_step(
    folder: str | Path, prompt_ids: Collection[str] | None = None, without: Collection[str] = ()
) -> list[Rollout]:
    """Return the rollouts of a step's folder, of all ranks, in training order; each once. ``prompt_ids``: of
    these prompts alone. ``without``: columns to leave out. Raises ValueError if there are none."""
    if not (files := step_files(Path(folder))):
        raise ValueError(f"{folder}: expected a recorded step (RUN/streams/step-*), found no {FILES}")
    files = _naming(files, prompt_ids)
    recorded = _assembled(files, prompt_ids=prompt_ids, without=without)
    return sorted(recorded.rollouts.values(), key=training_order)


def read_skeletons(files: Sequence[Path]) -> list[Rollout]:
    """Return the rollouts of some of a step's files without arrays, in training order: lengths, grades and
    finish reasons. Cheap: checksums are not verified, and prompts have neither tokens nor golds."""
    return sorted(_assembled(files, SKELETON).rollouts.values(), key=training_order)


def read_prompts(files: Sequence[Path]) -> list[Prompt]:
    """Return the whole prompts of some of a step's files, in the order in which they were drawn."""
    prompts = _assembled(files, (*SKELETON, "token_ids", "gold")).prompts.values()
    return sorted(prompts, key=lambda prompt: prompt.number)


def fill_numbers(skeletons: Sequence[Rollout], files: Sequence[Path]) -> None:
    """Read columns of one number for each token, and golds, of some ``read_skeletons`` of ``files``."""
    prompt_ids = {skeleton.prompt_id for skeleton in skeletons}
    columns = (*SKELETON, *NUMBERS, GIVEN.name, GIVEN.name + COUNTS, "gold")
    rollouts = _assembled(files, columns, prompt_ids).rollouts
    for skeleton in skeletons:
        rollout = rollouts[skeleton.key]
        skeleton.prompt = replace(skeleton.prompt, gold=rollout.prompt.gold)
        for part, source in zip(skeleton.parts, rollout.parts, strict=True):
            part.tokens = source.tokens


def read_progress(
    folder: Path,
    prompts: Sequence[Prompt],
    recipe: Recipe,
    resumed: Mapping[RolloutKey, RolloutOrigin] = MappingProxyType({}),
    files: Sequence[Path] | None = None,
    columns: Sequence[str] | None = None,
) -> HarvestProgress:
    """Return what earlier attempts at the step of ``folder`` recorded of ``prompts``, and the rollouts
    ``resumed``, which the step before recorded. ``files``: ``recorded_files``, if the folder may hold others
    by now. Tokens without ``columns``, by default those that the recipe keeps, are left out, to be generated
    again. Raises PartialRolloutError if one of ``resumed`` is not recorded."""
    by_id = {prompt.prompt_id: prompt for prompt in prompts}
    kept = recipe.rollout.columns if columns is None else columns
    files = recorded_files(folder) if files is None else files
    recorded = _assembled(_naming(files, by_id), prompt_ids=by_id)
    rollouts = {key: rollout for key, rollout in recorded.rollouts.items() if has_columns(rollout, kept)}
    for (prompt_id, _), rollout in rollouts.items():
        rollout.prompt = by_id[prompt_id]  # the gold answer may be another one by now
    partial = _resumed_rollouts(folder, by_id, recipe, resumed)
    # grades and tokens of earlier attempts at this step
    for key in partial.keys() & rollouts.keys():
        partial[key].restore_grades(rollouts[key].parts)
    # of an earlier attempt and of the step before the longer track holds the other
    for key in recorded.tracks.keys() - rollouts.keys():
        tracks, context = recorded.tracks[key], recorded.contexts.get(key)
        tracks = {number: known for number, known in tracks.items() if all(name in known for name in kept)}
        if not tracks or not has_path_columns(context, kept):
            continue
        rollout = partial.setdefault(key, PartialRollout(by_id[key[0]], key[1]))
        for number, known in tracks.items():
            rollout.tracks[number] = max(known, rollout.tracks.get(number, known), key=len)
        rollout.prompt_columns = context
    generated = sum(recorded.generated_tokens[key] for key in rollouts)
    generated += sum(rollout.new_tokens for rollout in partial.values())
    complete = sorted(rollouts.values(), key=training_order)
    return HarvestProgress(complete, list(partial.values()), generated, _counted(files, by_id))


def _counted(files: Sequence[Path], prompt_ids: Collection[str]) -> Counter[str]:
    """Return what harvests counted whose first prompt is among ``prompt_ids``."""
    attempts = defaultdict[str, Counter[str]](Counter)
    for path in files:
        notes = [batch.schema.metadata.get(NOTE_KEY) for batch in batches(path, SEGMENTS, ["prompt_id"])]
        first, counts = json.loads(next(filter(None, reversed(notes)), '["", {}]'))
        # both files of an attempt have what it counted up to their last batch
        attempts[path.name.removeprefix(OPEN)] |= Counter(counts if first in prompt_ids else {})
    return sum(attempts.values(), Counter())


def _resumed_rollouts(
    folder: Path, prompts: Mapping[str, Prompt], recipe: Recipe, resumed: Mapping[RolloutKey, RolloutOrigin]
) -> dict[RolloutKey, PartialRollout]:
    """Return the ``resumed`` rollouts as the step before ``folder`` recorded them, graded."""
    if not resumed:
        return {}
    number = step_number(folder.name)
    assert number, "the first step resumes nothing"
    before = folder.with_name(step_name(number - 1))
    names = {prompt_id for prompt_id, _ in resumed}
    # suspended rollouts lie with the complete ones, their tracks in the files of open ones
    recorded = _assembled(_naming(recorded_files(before), names), prompt_ids=names)
    suspended = {key: rollout for key, rollout in recorded.rollouts.items() if rollout.suspended}
    if missing := [key for key in resumed if key not in suspended]:
        (prompt_id, index), there = missing[0], len(resumed) - len(missing)
        expected = f"expected {len(resumed)} suspended rollouts, which this step resumes"
        found = f"found {there} of them: {prompt_id}/{index} is missing"
        ways = "go back to an earlier checkpoint, or start a new run from its weights (model.path)"
        raise PartialRolloutError(f"{before}: {expected}, {found}; {ways}")
    # whatever these tracks hold, earlier steps generated: it is not counted again
    return {
        key: PartialRollout(
            prompts[key[0]],
            key[1],
            tracks := recorded.tracks.get(key, {}),
            recorded.contexts.get(key),
            origin,
            age=number - origin.step,
            last_step=number - origin.step >= recipe.rollout.max_staleness,
            final={part.number: part for part in suspended[key].parts},
            earlier={track: tokens.generated for track, tokens in tracks.items()},
        )
        for key, origin in resumed.items()
    }


def has_columns(rollout: Rollout, names: Iterable[str]) -> bool:
    """Return True if all tokens of a rollout, its prompt's included, have these columns."""
    tables = [part.tokens for part in rollout.parts if len(part)]
    return all(name in table for name in names for table in tables) and (
        not tables or has_path_columns(rollout.prompt_columns, names)
    )


def has_path_columns(context: Tokens | None, names: Iterable[str]) -> bool:
    """Return True if a prompt's columns are complete: those of ``names`` that paths have."""
    of_path = [name for name in names if COLUMNS[name].of_path]
    return all(context is not None and name in context for name in of_path)


def recorded_files(folder: Path) -> list[Path]:
    """Return a step's files: of rollouts, then of unfinished ones."""
    return step_files(folder) + _in_order(folder.glob(OPEN_FILES))


def ungraded_files(folder: Path) -> list[Path]:
    """Return ``recorded_files`` without grades, which are removed: graders may have changed since."""
    for path in folder.glob(GRADE_FILES):
        path.unlink()
    return recorded_files(folder)


def remove_open_tracks(files: Sequence[Path], prompt_ids: Collection[str]) -> list[Path]:
    """Remove those of ``files`` whose unfinished rollouts are all of ``prompt_ids``, and complete by now;
    return the others."""
    unfinished = [path for path in files if path.name.startswith(OPEN)]
    done = [path for path in unfinished if values(path, SEGMENTS, "prompt_id").issubset(prompt_ids)]
    for path in done:
        path.unlink(missing_ok=True)
    return [path for path in files if path not in done]


def set_aside_stale(
    folder: Path, oldest: int, newest: float, carried: Mapping[RolloutKey, int] = MappingProxyType({})
) -> None:
    """Rename the records of a step and of later ones if other weights than versions ``oldest`` to ``newest``
    generated any of it, because a run went back to a checkpoint and now took an update that it had skipped
    before. ``carried``: oldest allowed version of each rollout that the step resumed."""
    versions = {version for path in recorded_files(folder) for version in _versions(path, oldest, carried)}
    if any(not oldest <= version <= newest for version in versions):
        # later steps came from the same weights, which are not this run's any more
        later = [step for step in sorted(folder.parent.glob("step-*")) if step.name > folder.name]
        aside, *_ = [step.rename(unused(step.with_name(f"stale-{step.name}"))) for step in (folder, *later)]
        found = f"generated with policy version {', '.join(map(str, sorted(versions)))}"
        logger.warning("%s: %s, but this run is at %d: set aside as %s", folder, found, oldest, aside.name)


def _versions(path: Path, oldest: int, carried: Mapping[RolloutKey, int]) -> set[int]:
    """Return the versions of a file's rollouts and tokens, except older ones that ``carried`` allows."""
    sampled_by: set[int] = set()
    for batch in batches(path, SEGMENTS, ["prompt_id", "index", "policy_version", "versions"]):
        known = [batch[name].to_pylist() for name in ("prompt_id", "index", "policy_version")]
        of_tokens = cells(batch["versions"])
        for prompt_id, index, of_rollout, versions in zip(*known, of_tokens, strict=True):
            # a rollout that an earlier step suspended may hold tokens of the versions since its start
            allowed = range(carried.get((prompt_id, index), oldest), oldest)
            sampled = set() if versions is None else set(np.unique(versions).tolist())
            sampled_by |= {version for version in sampled if version not in allowed} | {of_rollout}
    return sampled_by - {None, int(VERSIONS.unknown)}


def step_files(folder: Path) -> list[Path]:
    """Return a step's files of rollouts."""
    return _in_order(folder.glob(FILES))


def _in_order(files: Iterable[Path]) -> list[Path]:
    """Sort files so that first attempts come first: ``rank-0``, ``rank-1``, ``rank-0-2``."""
    return sorted(files, key=lambda path: (len(path.name), path.name))


def check_file(path: Path) -> None:
    """Verify the checksums of a closed file of rollouts or grades. Raises ValueError naming the file."""
    if is_closed(path):
        for _ in batches(path, GRADES if path.match(GRADE_FILES) else SEGMENTS):
            pass


def scored_steps(streams: Path, newest_first: bool = False) -> Iterator[tuple[int, Path]]:
    """Yield (number, folder) of the steps that are harvested and graded, which happens after the harvest."""
    names = os.listdir(streams) if streams.is_dir() else []
    for name in sorted(names, reverse=newest_first):  # by number, too
        number, folder = step_number(name), streams / name
        if number is not None and step_files(folder) and any(folder.glob(GRADE_FILES)):
            yield number, folder


def scored_between(streams: Path, first: int, last: int) -> list[Path]:
    """Return the folders of the graded steps ``first`` to ``last`` (from 1), or raise ValueError."""
    folders = {n + 1: folder for n, folder in scored_steps(streams)}
    if missing := next((step for step in range(first, last + 1) if step not in folders), 0):
        near = min(folders, key=lambda number: abs(number - missing), default=0)
        has = f"{len(folders)} of {min(folders)} to {max(folders)}, nearest {near}" if folders else "none"
        raise ValueError(f"--step: expected a graded step of {streams} ({has}), found {missing}")
    return [folders[step] for step in range(first, last + 1)]


def check_newest(streams: Path) -> None:
    """Verify the checksums of the newest steps' records. Raises ValueError naming a file that is damaged."""
    left = CHECKED_BYTES
    for _, folder in islice(scored_steps(streams, newest_first=True), CHECKED_STEPS):
        for path in (*step_files(folder), *folder.glob(GRADE_FILES)):
            check_file(path)
            left -= path.stat().st_size
        if left < 0:
            break


def read_grades(
    folder: Path, teacher: bool = False
) -> tuple[dict[GradeKey, Grade], dict[GradeKey, np.ndarray | None]]:
    """Return all grades of a step's folder, and if ``teacher`` the column that was recorded with them.
    Otherwise that column is not read, and checksums are not verified."""
    grades: dict[GradeKey, Grade] = {}
    taught: dict[GradeKey, np.ndarray | None] = {}
    names = [name for name in GRADES.names if name != TEACHER.name]
    for path in _in_order(folder.glob(GRADE_FILES)):
        for batch in batches(path, GRADES, None if teacher else names):
            rows = batch.select(names).to_pylist()
            keys: list[GradeKey] = [tuple(row.pop(name) for name in KEY) for row in rows]
            again = {key[:2] for key in keys}
            grades = {key: grade for key, grade in grades.items() if key[:2] not in again}
            for key, row in zip(keys, rows, strict=True):
                # without a verdict the row holds the teacher's column alone; of two attempts the last counts
                if row["verdict"] is not None:
                    grades[key] = Grade(**row | {"rewards": dict(row["rewards"])})
            if teacher:
                taught |= dict(zip(keys, cells(batch[TEACHER.name]), strict=True))
    return grades, taught


def recorded_steps(path: Path) -> list[tuple[str, list[Path]]]:
    """Return (name, files) of a file of rollouts, a step's folder, or each folder of one of steps, or of
    benchmarks."""
    if path.is_file():
        return [(path.name, [path])]
    folders = [path] if step_files(path) else sorted(path.glob("step-*")) or sorted(path.glob("*"))
    return [(folder.name, files) for folder in folders if (files := step_files(folder))]


def _naming(files: Sequence[Path], prompt_ids: Collection[str] | None) -> list[Path]:
    """Return the files that hold any of ``prompt_ids``."""
    if prompt_ids is None:
        return list(files)
    return [path for path in files if not values(path, SEGMENTS, "prompt_id").isdisjoint(prompt_ids)]


def _assembled(
    files: Sequence[Path],
    columns: Sequence[str] | None = None,
    prompt_ids: Collection[str] | None = None,
    without: Collection[str] = (),
) -> Assembly:
    """Read the files of one folder: all rows, or the rows of some prompts."""
    # the teacher's column is as long as the tokens: skeletons do without
    reads_teacher = columns is None or TEACHER.name in columns
    graded = read_grades(files[0].parent, reads_teacher) if files else ({}, {})
    assembly = Assembly(*graded, without=without)
    for path in files:
        for batch in batches(path, SEGMENTS, columns):
            for row in from_batch(batch):
                if prompt_ids is None or row["prompt_id"] in prompt_ids:
                    assembly.take(row)
        assembly.end_file()
    return assembly
