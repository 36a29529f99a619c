"""Recorded rollouts as rows of an Arrow table: the meaning of each column, and the conversion both ways.

    role        row
    prompt      a prompt, before the first rollout that answers it
    a b tail    segments of a stream; ``completion``: of a group; ``step``: of a sampled tree
    end         the rollout is complete, or suspended; readers leave out the rows of a rollout without it

Segments of a rollout are numbered (``Part.number``); a grade (in a file of its own) belongs to a number.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from megatron_eqlen.rollout.record.arrow_log import VERSION, VERSION_KEY, lists, pieces
from megatron_eqlen.rollout.record.route_columns import as_bytes, from_bytes, route_name, unread
from megatron_eqlen.sampling import KINDS, kind_of
from megatron_eqlen.sampling.harvester import RolloutHeader, RolloutPart, header_of
from megatron_eqlen.types import (
    NO_TOKENS,
    Grade,
    Placeholder,
    Prompt,
    Rollout,
    RolloutKey,
    Routes,
    SamplingMask,
    Segment,
    Versions,
    rollout_key,
)

PROMPT, END = "prompt", "end"

SEGMENTS = pa.schema(
    {
        "role": pa.string(),
        "prompt_id": pa.string(),
        "kind": pa.string(),  # of sampling
        "index": pa.int32(),  # which of the prompt's rollouts
        "policy_version": pa.int64(),  # of the rollout
        "versions": pa.list_(pa.int64()),  # of the segment's tokens: first token, version, first token, ...
        "number": pa.int32(),  # of the segment in its rollout
        "parent": pa.int32(),  # number of the step that a step continues, -1 for the prompt
        "finish_reason": pa.string(),
        "outcome": pa.string(),  # in the row ``end`` of a stream, or of any rollout that is suspended
        "generated_tokens": pa.int64(),  # in the row ``end``: in this step, of all tracks, parts or not
        "carried": pa.bool_(),  # Segment.carried
        "tokens": pa.int32(),  # how many; in the row ``end`` the prompt's routes
        "kept": pa.int32(),  # ids of all of the segment's sampling masks, null without masks
        "token_ids": pa.list_(pa.int32()),
        "logprobs": pa.list_(pa.float32()),
        "mask_ids": pa.list_(pa.int32()),
        "mask_counts": pa.list_(pa.uint8()),
        "route": pa.string(),  # what a token's row of routes is, null where none are recorded
        "question": pa.string(),  # from here on in the row ``prompt``
        "grader": pa.string(),
        "gold": pa.string(),
        "source": pa.string(),
        "prompt_number": pa.int64(),
        "routes": pa.list_(pa.uint8()),  # of a segment's tokens; in the row ``end`` of the prompt's
    },
    metadata={VERSION_KEY: str(VERSION)},
)

GRADES = pa.schema(
    {
        "prompt_id": pa.string(),
        "index": pa.int32(),
        "number": pa.int32(),
        "reward": pa.float64(),
        "verdict": pa.string(),
        "answer": pa.string(),
        "grader": pa.string(),
        "seconds": pa.float64(),
        "detail": pa.string(),
    },
    metadata={VERSION_KEY: str(VERSION)},
)

ARRAYS = ("token_ids", "logprobs", "mask_ids", "mask_counts", "routes")
"""Columns of arrays: nearly all of a record's bytes."""

SKELETON = tuple(name for name in SEGMENTS.names if name not in (*ARRAYS, "gold"))
"""Columns of skeletons: no arrays, and no golds, which may be long texts of tests."""

BATCH_TOKENS = 1 << 18
"""Tokens of a batch, which is copied and read at once: all streams of a step may end at the same moment."""

TOKEN_BYTES = 8
"""Bytes of a token's id and its log-prob."""

GradeKey = tuple[str, int, int]
"""(prompt_id, index, number) of a segment."""

Row = dict[str, Any]
"""Columns of ``SEGMENTS``; those that are not there are null."""


def prompt_row(prompt: Prompt) -> Row:
    row = asdict(prompt)
    row |= {"role": PROMPT, "prompt_number": row.pop("number"), "tokens": len(prompt.token_ids)}
    return row | {"token_ids": np.asarray(prompt.token_ids, np.int32)}


def rollout_rows(
    rollout: Rollout, generated_tokens: int | None = None, with_routes: bool = True
) -> list[Row]:
    """Return the rows of a rollout's segments and its end. ``generated_tokens``: tokens of its tracks, if
    known."""
    kind = kind_of(rollout)
    common = {
        "prompt_id": rollout.prompt_id,
        "kind": kind.name,
        "index": rollout.index,
        "policy_version": rollout.policy_version,
    }
    rows = [common | _part_row(part, with_routes) for part in kind.parts(rollout)]
    end = {"role": END, "outcome": header_of(rollout).outcome, "generated_tokens": generated_tokens}
    routes = rollout.prompt_routes if with_routes else None
    return [*rows, common | end | _route_columns(routes) | {"tokens": 0 if routes is None else len(routes)}]


def _route_columns(routes: Routes | None) -> Row:
    return {"route": route_name(routes), "routes": as_bytes(routes)}


def _part_row(part: RolloutPart, with_routes: bool) -> Row:
    segment, mask = part.segment, part.segment.sampling_mask
    return {
        "role": part.role,
        "number": part.number,
        "parent": part.parent,
        "finish_reason": segment.finish_reason,
        "versions": np.asarray(segment.versions, np.int64).reshape(-1),
        "carried": segment.carried,
        "tokens": len(segment),
        "kept": None if mask is None else len(mask.ids),
        "token_ids": segment.token_ids,
        "logprobs": segment.logprobs,
        "mask_ids": None if mask is None else mask.ids,
        "mask_counts": None if mask is None else mask.counts,
        **_route_columns(segment.routes if with_routes else None),
    }


def portions(rows: Iterable[Row]) -> Iterator[list[Row]]:
    """Yield the rows in lists of ``BATCH_TOKENS`` tokens or a few more; routes count as the tokens whose ids
    and log-probs would take as many bytes."""
    portion, tokens = [], 0
    for row in rows:
        portion.append(row)
        routes = row.get("routes")
        tokens += (row.get("tokens") or 0) + (0 if routes is None else len(routes) // TOKEN_BYTES)
        if tokens >= BATCH_TOKENS:
            yield portion
            portion, tokens = [], 0
    if portion:
        yield portion


def to_batch(rows: list[Row]) -> pa.RecordBatch:
    """Return the rows as columns; token arrays are copied once."""
    return pa.record_batch([_column(column, rows) for column in SEGMENTS], schema=SEGMENTS)


def _column(column: pa.Field, rows: list[Row]) -> pa.Array:
    values = [row.get(column.name) for row in rows]
    if not pa.types.is_list(column.type):
        return pa.array(values, column.type)
    return lists(values, column.type.value_type)


def from_batch(batch: pa.RecordBatch) -> Iterator[Row]:
    """Yield the rows of a batch, the inverse of ``to_batch``. Token arrays are views of the batch, or
    ``Placeholder`` where it lacks their columns."""
    names = batch.schema.names
    columns = [_values(batch.column(name)) for name in names]
    complete = set(ARRAYS) <= set(names)
    for values in zip(*columns, strict=True):
        row = dict(zip(names, values, strict=True))
        yield row if complete else _left_out(row) | row


def _left_out(row: Row) -> Row:
    """Return placeholders for the columns that were not read."""
    tokens, kept = (None if row[name] is None else Placeholder(row[name]) for name in ("tokens", "kept"))
    counts = None if kept is None else tokens
    arrays = {"token_ids": tokens, "logprobs": tokens, "mask_ids": kept, "mask_counts": counts}
    return arrays | {"routes": None, "gold": ""}


def _values(column: pa.Array) -> Iterable[Any]:
    return pieces(column) if pa.types.is_list(column.type) else column.to_pylist()


@dataclass
class Assembly:
    """Rollouts from rows, as their ends come."""

    grades: dict[GradeKey, Grade] = field(default_factory=dict)
    prompts: dict[str, Prompt] = field(default_factory=dict)
    rollouts: dict[tuple[str, int], Rollout] = field(default_factory=dict)
    """Rollouts with an end; of two with one key the first."""
    with_routes: bool = True
    """False: rollouts get no routes."""
    generated_tokens: dict[RolloutKey, int] = field(default_factory=dict)
    """Tokens that were generated for each rollout, where known."""
    _open: dict[tuple[str, int], list[RolloutPart]] = field(default_factory=dict)

    def take(self, row: Row) -> None:
        """Add a row. Raises ValueError or KeyError for a row that does not fit its place."""
        key = row["prompt_id"], row["index"]
        if row["role"] == PROMPT:
            self.prompts[row["prompt_id"]] = _prompt(row)
        elif row["role"] == END:
            header = RolloutHeader(
                self.prompts[key[0]], key[1], row["policy_version"], row["outcome"], self._routes(row)
            )
            self.rollouts.setdefault(key, _kind(row["kind"]).join(header, self._open.pop(key, [])))
            self.generated_tokens.setdefault(key, row["generated_tokens"] or 0)
        else:
            self._open.setdefault(key, []).append(self._part(row))

    def _routes(self, row: Row) -> Routes | None:
        name, data = row["route"], row["routes"]
        if not self.with_routes or name is None:
            return None
        return unread(name, row["tokens"]) if data is None else from_bytes(name, data)

    def _part(self, row: Row) -> RolloutPart:
        ids, counts = row["mask_ids"], row["mask_counts"]
        segment = Segment(
            row["token_ids"],
            row["logprobs"],
            row["finish_reason"],
            self.grades.get((row["prompt_id"], row["index"], row["number"])),
            None if counts is None else SamplingMask(NO_TOKENS if ids is None else ids, counts),
            routes=self._routes(row),
            versions=_runs(row["versions"].tolist()),
            carried=row["carried"],
        )
        return RolloutPart(row["role"], row["number"], segment, row["parent"])


def _runs(numbers: list[int]) -> Versions:
    return tuple(zip(numbers[::2], numbers[1::2], strict=True))


def _kind(name: str) -> Any:
    if name not in KINDS:
        raise ValueError(f"kind: expected {', '.join(KINDS)}, found {name!r}")
    return KINDS[name]


def _prompt(row: Row) -> Prompt:
    return Prompt(
        prompt_id=row["prompt_id"],
        token_ids=[] if isinstance(row["token_ids"], Placeholder) else row["token_ids"].tolist(),
        question=row["question"],
        grader=row["grader"],
        gold=row["gold"],
        source=row["source"],
        number=row["prompt_number"],
    )


def grade_rows(rollouts: Iterable[Rollout]) -> list[Row]:
    """Return a row for each grade of ``rollouts``."""
    return [
        dict(zip(("prompt_id", "index", "number"), (*rollout_key(rollout), part.number), strict=True))
        | asdict(part.segment.grade)
        for rollout in rollouts
        for part in kind_of(rollout).parts(rollout)
        if part.segment.grade is not None
    ]


def grades_of(rows: Iterable[Row]) -> dict[GradeKey, Grade]:
    """Return the grades of rows, the inverse of ``grade_rows``."""
    keys = ("prompt_id", "index", "number")
    return {
        tuple(row[key] for key in keys): Grade(**{k: v for k, v in row.items() if k not in keys})
        for row in rows
    }
