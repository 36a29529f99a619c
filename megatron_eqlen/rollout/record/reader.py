"""Readers of the files of ``recorder``: rollouts with arrays or as skeletons, the progress of an attempt that
was cut short, and tables for notebooks."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import pyarrow as pa

from megatron_eqlen.files import unused
from megatron_eqlen.rollout.partial import HarvestProgress
from megatron_eqlen.rollout.record import journal
from megatron_eqlen.rollout.record.arrow_log import (
    OLD_VERSION,
    batches,
    check_version,
    other_version,
    placed,
    values,
)
from megatron_eqlen.rollout.record.format import (
    END,
    PROMPT,
    SEGMENTS,
    SKELETON,
    Assembly,
    from_batch,
    grades_of,
)
from megatron_eqlen.rollout.record.recorder import FILES, GRADE_FILES, JOURNALS, OLD_FILES
from megatron_eqlen.sampling.track import rollout_of
from megatron_eqlen.types import (
    Grade,
    Prompt,
    Rollout,
    RolloutKey,
    rollout_key,
    training_order,
)

RowKey = tuple[str, int | None]
"""(prompt_id, index of the rollout), or None for the prompt itself."""

logger = logging.getLogger(__name__)


def read_dump(path: str | Path) -> list[Rollout]:
    """Return the rollouts of a file with the grades beside it, in the order in which they were completed.

    A torn end is dropped with a warning. Raises ValueError, naming the file, where it is damaged, is no
    record of rollouts, or is of another version of the format.
    """
    path = Path(path)
    return list(_assembled([path]).rollouts.values())


def read_step(
    folder: Path, prompt_ids: Collection[str] | None = None, with_routes: bool = True
) -> list[Rollout]:
    """Return the rollouts of a step's folder, whichever ranks recorded them, in training order; each once.

    ``prompt_ids``: only rollouts of these prompts; files that hold none of them are not read. Without
    ``with_routes`` rollouts have no routes, whatever is recorded.
    """
    files = _naming(step_files(folder), prompt_ids)
    return _in_training_order(_assembled(files, prompt_ids=prompt_ids, with_routes=with_routes))


def read_skeletons(files: Sequence[Path]) -> list[Rollout]:
    """Return the rollouts of some of a step's files without arrays, in training order: lengths, grades and
    finish reasons. The cost depends on their number, not on their tokens: checksums are not verified. Prompts
    have neither tokens nor golds."""
    return _in_training_order(_assembled(files, SKELETON))


def read_prompts(files: Sequence[Path]) -> list[Prompt]:
    """Return the whole prompts of some of a step's files, in the order in which they were drawn."""
    assembly, columns = Assembly(), (*SKELETON, "token_ids", "gold")
    for path in files:
        named: set[RowKey] = {(name, None) for name in values(path, SEGMENTS, "prompt_id")}
        for batch in batches(path, SEGMENTS, columns, _places(path, named)):
            for row in from_batch(batch):
                if row["role"] == PROMPT:
                    assembly.take(row)
    return sorted(assembly.prompts.values(), key=lambda prompt: prompt.number)


def fill_token_ids(skeletons: Sequence[Rollout], files: Sequence[Path]) -> None:
    """Read the token ids, and their prompts' golds, of some of the rollouts that ``read_skeletons`` found in
    ``files``."""
    rows: set[RowKey] = {
        row for skeleton in skeletons for row in (rollout_key(skeleton), (skeleton.prompt_id, None))
    }
    rollouts = _assembled(files, (*SKELETON, "token_ids", "gold"), rows).rollouts
    for skeleton in skeletons:
        rollout = rollouts[rollout_key(skeleton)]
        skeleton.prompt = replace(skeleton.prompt, gold=rollout.prompt.gold)
        segments = zip(skeleton.segments(), rollout.segments(), strict=True)
        for segment, found in segments:
            segment.token_ids = found.token_ids


def read_progress(
    files: Sequence[Path], prompt_ids: Collection[str], with_routes: bool = False
) -> HarvestProgress:
    """Return the results that ``recorded_files`` hold of ``prompt_ids``. ``with_routes``: leave out tokens
    without routes (the attempt kept none, or ``rollout.record_routes`` is off), to be generated again."""
    recorded = [path for path in files if not _is_journal(path)]
    assembly = _assembled(_naming(recorded, prompt_ids), prompt_ids=prompt_ids, with_routes=with_routes)
    journaled = journal.read_journals(filter(_is_journal, files), prompt_ids)
    tracks = journaled.tracks
    if with_routes:
        for key in [key for key, rollout in assembly.rollouts.items() if not has_routes(rollout)]:
            del assembly.rollouts[key]
        tracks = {
            name: known
            for name, known in tracks.items()
            if known.routes is not None and rollout_of(name) in journaled.prompt_routes
        }
    tracks = {name: known for name, known in tracks.items() if rollout_of(name) not in assembly.rollouts}
    generated = sum(assembly.generated_tokens[key] for key in assembly.rollouts)
    generated += sum(map(len, tracks.values()))
    return HarvestProgress(_in_training_order(assembly), tracks, generated, journaled.prompt_routes)


def has_routes(rollout: Rollout) -> bool:
    """Return True if all tokens of a rollout have routes, and its prompt if there are any."""
    routes = [segment.routes for segment in rollout.segments() if len(segment)]
    return not routes or all(rows is not None for rows in (rollout.prompt_routes, *routes))


def recorded_files(folder: Path) -> list[Path]:
    """Return a step's files of rollouts and its journals."""
    return step_files(folder) + _in_order(folder.glob(JOURNALS))


def remove_journals(files: Iterable[Path], prompt_ids: Collection[str]) -> None:
    """Remove the journals among ``files`` that hold tracks of ``prompt_ids`` only, whose rollouts are
    complete."""
    for path in filter(_is_journal, files):
        if journal.prompts_of(path).issubset(prompt_ids):
            path.unlink(missing_ok=True)


def set_aside_stale(
    folder: Path, oldest: int, newest: float, carried: Mapping[RolloutKey, int] = MappingProxyType({})
) -> None:
    """Rename a step's record, and those of the steps after it, if weights of other versions than ``oldest``
    to ``newest`` generated any of it. ``carried``: oldest allowed version of each rollout that the step
    resumed.

    This happens where a run went back to a checkpoint, and now took an update that it had skipped before.
    """
    files = recorded_files(folder)
    found = {version for path in files for version in _versions(path, oldest, carried)}
    if any(not oldest <= version <= newest for version in found):
        later = [step for step in sorted(folder.parent.glob("step-*")) if step.name > folder.name]
        aside, *_ = [step.rename(unused(step.with_name(f"stale-{step.name}"))) for step in (folder, *later)]
        logger.warning(
            "%s: generated with policy version %s, but this run is at %d: set aside as %s",
            folder,
            ", ".join(map(str, sorted(found))),
            oldest,
            aside.name,
        )


def _versions(path: Path, oldest: int, carried: Mapping[RolloutKey, int]) -> set[int]:
    """Return the versions of a file's rollouts and their tokens, except for versions before ``oldest`` that
    ``carried`` allows."""
    if _is_journal(path):  # of this step alone
        return values(path, journal.SCHEMA, "policy_version")
    found = values(path, SEGMENTS, "policy_version") - {None}  # prompts have none
    for batch in batches(path, SEGMENTS, ["prompt_id", "index", "versions"]):
        for prompt_id, index, runs in zip(*(column.to_pylist() for column in batch.columns), strict=True):
            allowed = range(carried.get((prompt_id, index), oldest), oldest)
            found |= {version for version in (runs or ())[1::2] if version not in allowed}
    return found


def step_files(folder: Path) -> list[Path]:
    """Return a step's files of rollouts. Raises ValueError where they are of an older version."""
    if old := sorted(folder.glob(OLD_FILES)):
        raise other_version(old[0], OLD_VERSION)
    return _in_order(folder.glob(FILES))


def _is_journal(path: Path) -> bool:
    return path.name.startswith(journal.PREFIX)


def _in_order(files: Iterable[Path]) -> list[Path]:
    """Sort files so that first attempts come first: ``rank-0``, ``rank-1``, ``rank-0-2``."""
    return sorted(files, key=lambda path: (len(path.name), path.name))


def read_grades(folder: Path) -> dict[tuple[str, int, int], Grade]:
    """Return all grades of a step's folder, by prompt_id, index and number of the segment."""
    grades: dict[tuple[str, int, int], Grade] = {}
    for path in _in_order(folder.glob(GRADE_FILES)):
        table = pa.ipc.open_file(pa.memory_map(str(path))).read_all()
        check_version(path, table.schema)
        grades = grades_of(table.to_pylist()) | grades
    return grades


def read_streams(path: str | Path) -> Iterator[pa.Table]:
    """Yield recorded segments for a notebook: a table for each file of ``path``, which is a file, a step's
    folder or a run's ``streams/`` folder.

    Columns are those of ``record_format.SEGMENTS`` up to ``mask_counts``, then ``step`` (the folder's name)
    and ``reward`` and ``verdict``, null where a segment ends no graded response.
    """
    path = Path(path)
    files = (
        [path]
        if path.is_file()
        else [*step_files(path)]
        or [file for folder in sorted(path.glob("step-*")) for file in step_files(folder)]
    )
    for file in files:
        yield _table(file)


def _table(path: Path) -> pa.Table:
    table = pa.Table.from_batches(list(batches(path, SEGMENTS)), SEGMENTS)
    roles = table["role"].to_pylist()
    table = table.filter(pa.array([role not in (PROMPT, END) for role in roles]))
    table = table.select(SEGMENTS.names[: SEGMENTS.names.index("question")])
    grades, keys = read_grades(path.parent), ("prompt_id", "index", "number")
    found = [grades.get(key) for key in zip(*(table[name].to_pylist() for name in keys), strict=True)]
    for name, column in {
        "step": [path.parent.name] * len(found),
        "reward": [grade and grade.reward for grade in found],
        "verdict": [grade and grade.verdict for grade in found],
    }.items():
        table = table.append_column(name, pa.array(column, pa.float64() if name == "reward" else pa.string()))
    return table


def _in_training_order(assembly: Assembly) -> list[Rollout]:
    return sorted(assembly.rollouts.values(), key=training_order)


def _naming(files: Sequence[Path], prompt_ids: Collection[str] | None) -> list[Path]:
    """Return the files that hold any of ``prompt_ids``."""
    if prompt_ids is None:
        return list(files)
    return [path for path in files if not values(path, SEGMENTS, "prompt_id").isdisjoint(prompt_ids)]


def _assembled(
    files: Sequence[Path],
    columns: Sequence[str] | None = None,
    wanted: set[RowKey] | None = None,
    prompt_ids: Collection[str] | None = None,
    with_routes: bool = True,
) -> Assembly:
    """Read the files of one folder: all rows, only the ``wanted`` rows, or the rows of some prompts."""
    assembly = Assembly(read_grades(files[0].parent) if files else {}, with_routes=with_routes)
    for path in files:
        for batch in batches(path, SEGMENTS, columns, None if wanted is None else _places(path, wanted)):
            for row in from_batch(batch):
                asked = prompt_ids is None or row["prompt_id"] in prompt_ids
                if asked and (wanted is None or (row["prompt_id"], row["index"]) in wanted):
                    assembly.take(row)
    return assembly


def _places(path: Path, wanted: set[RowKey]) -> list[int]:
    """Return the places where batches begin that hold any of the rows."""
    return [
        place
        for place, batch in placed(path, SEGMENTS, ["prompt_id", "index"])
        if not wanted.isdisjoint(zip(*(column.to_pylist() for column in batch.columns), strict=True))
    ]
