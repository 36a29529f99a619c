"""Recorded rollouts as rows of an Arrow table: the meaning of each column, and the conversion both ways.

    role        row
    prompt      a prompt, before the first rollout that answers it
    a b tail    parts of a stream; ``completion``: of a group; ``step``: of a sampled tree (``Part.role``)
    context     columns of a rollout's prompt, where any are kept
    end         the rollout is complete, or suspended; readers leave out the parts of a rollout without it
    track       tokens that a track of an unfinished rollout got since its row before (``recorder``)

Parts and tracks of a rollout are numbered. A grade belongs to a part's number, in a file of its own.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from megatron_eqlen.record.arrow_log import VERSION, VERSION_KEY
from megatron_eqlen.sampling.track import Track
from megatron_eqlen.tokens import COLUMNS, TEACHER, Column, Ragged, Tokens
from megatron_eqlen.types import Grade, Part, Prompt, Rollout, RolloutKey

PROMPT, CONTEXT, END, TRACK = "prompt", "context", "end", "track"

COUNTS = "_counts"
"""Ending of the name of a ragged column's counts."""

NOTE_KEY = b"eqlen.note"
"""Key, in a batch's metadata, of what the harvest has counted: JSON of (first prompt's id, counts)."""


def _fields(columns: Collection[Column]) -> dict[str, pa.DataType]:
    """Return the columns of the table that hold token columns; those of arrays as bytes."""
    types = {column.name: pa.list_(pa.from_numpy_dtype(column.dtype or "uint8")) for column in columns}
    return types | {column.name + COUNTS: pa.list_(pa.uint8()) for column in columns if column.ragged}


SEGMENTS = pa.schema(
    {
        "role": pa.string(),
        "prompt_id": pa.string(),
        "kind": pa.string(),  # of sampling
        "index": pa.int32(),  # which of the prompt's rollouts
        "policy_version": pa.int64(),  # of the rollout
        "number": pa.int32(),  # of the part or track in its rollout
        "parent": pa.int32(),  # number of the part that it continues, -1 for the prompt
        "finish_reason": pa.string(),
        "outcome": pa.string(),  # in the row ``end``; of a part its environment's grade, as JSON
        "generated_tokens": pa.int64(),  # in the row ``end``: in this step, of all tracks, parts or not
        "carried": pa.bool_(),  # Part.carried
        "tokens": pa.int32(),  # how many
        "layout": pa.string(),  # Tokens.layout
        **_fields([column for column in COLUMNS.values() if column.dtype]),
        "question": pa.string(),  # from here on in the row ``prompt``
        "grader": pa.string(),
        "gold": pa.string(),
        "source": pa.string(),
        "prompt_number": pa.int64(),
        **_fields([column for column in COLUMNS.values() if not column.dtype]),
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
        "rewards": pa.map_(pa.string(), pa.float64()),
        TEACHER.name: pa.list_(pa.float32()),  # column of the part, which a server filled after the harvest
    },
    metadata={VERSION_KEY: str(VERSION)},
)

SKELETON = tuple(name for name in SEGMENTS.names if name not in (*_fields(COLUMNS.values()), "gold"))
"""Columns of skeletons: no tokens, and no golds, which may be long texts of tests."""

BATCH_BYTES = 1 << 21
"""Bytes of tokens in a batch, which is copied and read at once: all streams may end at the same moment."""

KEY = ("prompt_id", "index", "number")
GradeKey = tuple[str, int, int]
"""``KEY`` of a part."""

RecordedRow = dict[str, Any]
"""Columns of ``SEGMENTS``; those that are not there are null. ``table`` holds all columns of tokens."""


# ---- to rows ---------------------------------------------------------------------------------------------


def prompt_row(prompt: Prompt) -> RecordedRow:
    row = asdict(prompt)
    row |= {"role": PROMPT, "prompt_number": row.pop("number")}
    return row | {"table": Tokens.of(row.pop("token_ids"))}


def rollout_rows(
    rollout: Rollout, generated_tokens: int | None = None, without: Collection[str] = ()
) -> list[RecordedRow]:
    """Return the rows of a rollout's parts and its end. ``generated_tokens``: of its tracks; None: neither it
    nor an environment's grades are recorded. ``without``: columns left out."""
    common = {
        "prompt_id": rollout.prompt_id,
        "kind": rollout.kind,
        "index": rollout.index,
        "policy_version": rollout.policy_version,
    }
    rows: list[RecordedRow] = [
        {name: getattr(part, name) for name in ("role", "number", "parent", "finish_reason", "carried")}
        | {"table": part.tokens}
        for part in rollout.parts
    ]
    for part, row in zip(rollout.parts, rows, strict=True):
        # the grade that a part came with; an earlier step recorded that of a carried one
        if not (generated_tokens is None or part.grade is None or part.carried):
            row["outcome"] = json.dumps(asdict(part.grade))
    if rollout.prompt_columns is not None:
        rows.append({"role": CONTEXT, "table": rollout.prompt_columns})
    for row in rows if without else ():
        row["table"] = row["table"].without(without)
    # last: readers take the rollout for unfinished until they meet this row
    rows.append({"role": END, "outcome": rollout.outcome, "generated_tokens": generated_tokens})
    return [common | row for row in rows]


def track_rows(track: Track, start: int, stop: int, with_prompt: bool) -> list[RecordedRow]:
    """Return the row of tokens ``start`` to ``stop`` of a track, and before it, if ``with_prompt``, that of
    its prompt's columns. Any thread may call this: a track only ever grows."""
    place = dict(zip(KEY, (*track.key, track.number), strict=True))
    row = place | {"role": TRACK, "table": track.tokens[start:stop]}
    return [place | {"role": CONTEXT, "table": track.prompt_columns}, row] if with_prompt else [row]


def portions(rows: Iterable[RecordedRow]) -> Iterator[list[RecordedRow]]:
    """Yield the rows in lists of ``BATCH_BYTES`` of tokens or a few more."""
    portion, size = [], 0
    for row in rows:
        portion.append(row)
        size += row["table"].nbytes if "table" in row else 0
        if size >= BATCH_BYTES:
            yield portion
            portion, size = [], 0
    if portion:
        yield portion


def to_batch(rows: list[RecordedRow], note: str = "") -> pa.RecordBatch:
    """Return the rows as columns; arrays are copied once. ``note``: as ``NOTE_KEY``."""
    # columns of texts and numbers; a row that lacks one has null there
    given = set().union(*rows)
    columns = {name: [row.get(name) for row in rows] for name in (*SKELETON, "gold") if name in given}
    tables: list[Tokens | None] = [row.get("table") for row in rows]
    columns["tokens"] = [None if table is None else len(table) for table in tables]
    columns["layout"] = [None if table is None else table.layout for table in tables]
    # columns of tokens: a list for each row; ragged ones take two lists, the numbers and their counts
    for name in set().union(*(table.columns for table in tables if table is not None)):
        cells = [None if table is None else table.columns.get(name) for table in tables]
        if COLUMNS[name].ragged:
            columns[name + COUNTS] = [None if values is None else values.counts for values in cells]
            cells = [None if values is None else values.values for values in cells]
        # arrays whose type is the model's go as bytes: `layout` keeps their shape and type
        if COLUMNS[name].dtype is None:
            rows_of = [None if values is None else np.ascontiguousarray(values) for values in cells]
            cells = [None if values is None else values.reshape(-1).view(np.uint8) for values in rows_of]
        columns[name] = cells
    nothing = [None] * len(rows)
    arrays = [pa.array(columns.get(field.name, nothing), field.type) for field in SEGMENTS]
    return pa.record_batch(arrays, schema=SEGMENTS.with_metadata({NOTE_KEY: note}))


# ---- from rows -------------------------------------------------------------------------------------------


def from_batch(batch: pa.RecordBatch) -> Iterator[RecordedRow]:
    """Yield the rows of a batch, as views. Tables whose columns were not read are bare."""
    names = batch.schema.names
    columns = [cells(batch.column(name)) for name in names]
    for values in zip(*columns, strict=True):
        row = {"gold": ""} | dict(zip(names, values, strict=True))
        yield row if row.get("layout") is None else row | {"table": _table(row)}


def cells(column: pa.Array) -> Iterable[Any]:
    """Return the values of a column: of lists as arrays, which are views."""
    return column.to_numpy(zero_copy_only=False) if pa.types.is_list(column.type) else column.to_pylist()


def _table(row: RecordedRow) -> Tokens:
    table = Tokens.absent(row["tokens"], row["layout"])
    return Tokens({name: _read(row, name, absent) for name, absent in table.columns.items()}, len(table))


def _read(row: RecordedRow, name: str, absent: Any) -> Any:
    """Return the values of a column, or ``absent`` where they were not read."""
    data = row.get(name)
    if data is None:
        return absent
    if COLUMNS[name].ragged:
        return Ragged(data, row[name + COUNTS])
    return data.view(absent.dtype).reshape(absent.shape) if COLUMNS[name].dtype is None else data


@dataclass
class Assembly:
    """Rollouts from rows, as their ends come, and the tokens of unfinished ones."""

    grades: dict[GradeKey, Grade] = field(default_factory=dict)
    taught: dict[GradeKey, np.ndarray | None] = field(default_factory=dict)
    """Columns ``teacher`` of parts."""
    without: Collection[str] = ()
    """Columns that are left out."""
    prompts: dict[str, Prompt] = field(default_factory=dict)
    rollouts: dict[RolloutKey, Rollout] = field(default_factory=dict)
    """Rollouts with an end; of two with one key the last, which a later attempt has generated again."""
    generated_tokens: dict[RolloutKey, int] = field(default_factory=dict)
    """Tokens that were generated for each rollout, where known."""
    tracks: dict[RolloutKey, dict[int, Tokens]] = field(default_factory=dict)
    """Tokens of each track of unfinished rollouts, by its number; of two files those that got further."""
    contexts: dict[RolloutKey, Tokens] = field(default_factory=dict)
    """Columns of prompts."""
    _open: dict[RolloutKey, list[Part]] = field(default_factory=dict)
    _pieces: dict[RolloutKey, dict[int, list[Tokens]]] = field(default_factory=dict)
    """Tokens of tracks in the file that is being read."""

    def take(self, row: RecordedRow) -> None:
        """Add a row. Raises ValueError or KeyError for a row that does not fit its place."""
        key = row["prompt_id"], row["index"]
        if "table" in row and self.without:
            row["table"] = row["table"].without(self.without)
        match row["role"]:
            case "prompt":
                self.prompts[row["prompt_id"]] = _prompt(row)
            case "context":
                # with `without` nothing may be left of it
                if row["table"].columns:
                    self.contexts[key] = row["table"]
            case "track":
                # joined at the end of the file: another file of the step has the same track from its start
                self._pieces.setdefault(key, {}).setdefault(row["number"], []).append(row["table"])
            case "end":
                rollout = Rollout(
                    self.prompts[key[0]],
                    key[1],
                    row["kind"],
                    row["policy_version"],
                    self._open.pop(key, []),
                    row["outcome"],
                    self.contexts.pop(key, None),
                )
                self.rollouts[key] = rollout
                self.generated_tokens[key] = row["generated_tokens"] or 0
            case _:
                # a part, whatever its role: it waits for the end of its rollout
                self._open.setdefault(key, []).append(self._part(row))

    def end_file(self) -> None:
        """Join the tokens of the file's tracks."""
        for key, tracks in self._pieces.items():
            known = self.tracks.setdefault(key, {})
            for number, pieces_of_track in tracks.items():
                tokens = Tokens.joined(pieces_of_track)
                # each file has a track from its first token on, so the longer one holds the other
                known[number] = max(tokens, known.get(number, tokens), key=len)
        self._pieces = {}

    def _part(self, row: RecordedRow) -> Part:
        key = row["prompt_id"], row["index"], row["number"]
        tokens = row["table"]
        if (taught := self.taught.get(key)) is not None and TEACHER.name not in self.without:
            tokens = tokens.with_column(TEACHER.name, taught)
        grade = self.grades.get(key)
        # an environment's grade lies with the part, until scoring has recorded the final one
        if grade is None and row["outcome"]:
            grade = Grade(**json.loads(row["outcome"]))
        place = {name: row[name] for name in ("role", "number", "parent", "carried")}
        return Part(tokens, row["finish_reason"], grade, **place)


def _prompt(row: RecordedRow) -> Prompt:
    tokens = row["table"]
    return Prompt(
        prompt_id=row["prompt_id"],
        token_ids=[] if tokens.is_bare else tokens.token_ids.tolist(),
        question=row["question"],
        grader=row["grader"],
        gold=row["gold"],
        source=row["source"],
        number=row["prompt_number"],
    )


def grade_rows(rollouts: Iterable[Rollout]) -> list[RecordedRow]:
    """Return a row for each part of ``rollouts`` that has a grade or the column ``teacher``."""
    return [
        dict(zip(KEY, (*rollout.key, part.number), strict=True))
        | (asdict(part.grade) if part.grade is not None else {})
        | dict(part.tokens.only([TEACHER.name]).columns)
        for rollout in rollouts
        for part in rollout.parts
        if part.grade is not None or TEACHER.name in part.tokens
    ]
