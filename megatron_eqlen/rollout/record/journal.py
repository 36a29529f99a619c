"""Journals: tokens of unfinished rollouts on disk, so that a killed harvest loses only its last seconds.

    step-00000012/journal-rank-0.arrow       beside rank-0.arrow; removed when the harvest has ended
    step-00000012/suspended-rank-0.arrow     in the same format, of the rollouts that the harvest suspended

A row holds the tokens that one track got since its last row, with a row for each policy version; a batch, the
rows of all tracks at one moment. The result of a harvester depends on the tokens of its tracks alone, so only
these are recorded: a new attempt gives its tracks the tokens that they had, its harvesters cut the same
parts, and the engine continues where the tokens end.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from megatron_eqlen.files import replaced
from megatron_eqlen.rollout.record.arrow_log import (
    VERSION,
    VERSION_KEY,
    ArrowLog,
    batches,
    lists,
    pieces,
    values,
)
from megatron_eqlen.rollout.record.route_columns import as_bytes, from_bytes, route_name
from megatron_eqlen.sampling.track import Track, rollout_of
from megatron_eqlen.types import (
    RolloutKey,
    Routes,
    SamplingMask,
    Segment,
    joined,
    joined_versions,
    version_spans,
)

PREFIX, SUSPENDED_PREFIX = "journal-", "suspended-"
"""Prefixes of file names; the name of the file of rollouts is appended."""

SCHEMA = pa.schema(
    {
        "prompt_id": pa.string(),
        "track": pa.string(),  # Track.name
        "policy_version": pa.int64(),
        "token_ids": pa.list_(pa.int32()),
        "logprobs": pa.list_(pa.float32()),
        "mask_ids": pa.list_(pa.int32()),
        "mask_counts": pa.list_(pa.uint8()),
        "route": pa.string(),  # what a row of routes is
        "routes": pa.list_(pa.uint8()),
        "prompt_routes": pa.list_(pa.uint8()),  # of the rollout's prompt, in one row of it
    },
    metadata={VERSION_KEY: str(VERSION)},
)


class NewTokens(NamedTuple):
    """Tokens ``start`` to ``stop`` of a track, of one policy version, and the place of their mask's ids."""

    track: Track
    start: int
    stop: int
    mask_start: int
    mask_stop: int
    policy_version: int
    prompt_routes: Routes | None
    """Routes of the rollout's prompt, if they are new as well."""


class Journal:
    """Writes a new file with the first new tokens.

    ``new_tokens`` is called in the thread where tracks grow and costs no more than a look at each; ``write``
    copies the tokens, in a thread of its own: a track only ever grows, so tokens never change.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: ArrowLog | None = None
        self._followed: dict[Track, tuple[int, int]] = {}
        """Numbers of tokens, and of ids of their masks, that were returned as new before."""
        self._prompts: set[RolloutKey] = set()
        """Rollouts whose prompt's routes were returned as new before."""

    def follow(self, track: Track) -> None:
        """Return the tokens that ``track`` gets from now on as new, until it has ended."""
        self._followed.setdefault(track, (len(track.token_ids), len(track.mask_ids)))

    def new_tokens(self) -> list[NewTokens]:
        """Return the tokens that the tracks got since the last call."""
        found = [
            piece
            for track, (start, mask_start) in self._followed.items()
            if len(track.token_ids) > start
            for piece in _pieces_of(track, start, mask_start, self._new_prompt_routes(track))
        ]
        self._followed |= {piece.track: (piece.stop, piece.mask_stop) for piece in found}
        for piece in found:
            if piece.track.finish_reason is not None:
                self._followed.pop(piece.track, None)
        return found

    def _new_prompt_routes(self, track: Track) -> Routes | None:
        if track.prompt_routes is None or (key := rollout_of(track.name)) in self._prompts:
            return None
        self._prompts.add(key)
        return track.prompt_routes

    def write(self, new_tokens: Sequence[NewTokens]) -> None:
        """Append new tokens to the file."""
        if not new_tokens:
            return
        if self._file is None:
            self._file = ArrowLog(self.path, SCHEMA)
        self._file.write(_batch(new_tokens))

    def abandon(self) -> None:
        """Close the file as it is, for the next attempt."""
        if self._file is not None:
            self._file.abandon()

    def remove(self) -> None:
        self.abandon()
        self.path.unlink(missing_ok=True)


def write_tracks(path: Path, rollouts: Iterable[Sequence[Track]]) -> None:
    """Write all tokens of the tracks of some rollouts to a new file, which appears whole."""
    with replaced(path) as partial:
        file = ArrowLog(partial, SCHEMA)
        for tracks in rollouts:
            routes = (track.prompt_routes for track in tracks)
            prompt_routes = next((rows for rows in routes if rows is not None), None)
            grown = (track for track in tracks if len(track))
            file.write(_batch([piece for track in grown for piece in _pieces_of(track, 0, 0, prompt_routes)]))
        file.close()


def _pieces_of(
    track: Track, start: int, mask_start: int, prompt_routes: Routes | None
) -> Iterator[NewTokens]:
    """Yield all tokens of ``track`` from ``start`` on, each policy version by itself."""
    count = len(track.token_ids)
    for first, last, version in version_spans(track.versions(start, count), count - start):
        begin, stop = start + first, start + last
        mask_stop = mask_start + sum(track.mask_counts[begin:stop])
        yield NewTokens(track, begin, stop, mask_start, mask_stop, version, prompt_routes)
        mask_start, prompt_routes = mask_stop, None


def _batch(rows: Sequence[NewTokens]) -> pa.RecordBatch:
    tokens = [row.stop - row.start for row in rows]
    masks = [row.mask_stop - row.mask_start for row in rows]
    columns = {
        "prompt_id": pa.array([row.track.prompt_id for row in rows]),
        "track": pa.array([row.track.name for row in rows]),
        "policy_version": pa.array([row.policy_version for row in rows]),
        "token_ids": _lists("i", tokens, (row.track.token_ids[row.start : row.stop] for row in rows)),
        "logprobs": _lists("f", tokens, (row.track.logprobs[row.start : row.stop] for row in rows)),
    }
    if any(masks):
        kept = (row.track.mask_ids[row.mask_start : row.mask_stop] for row in rows)
        columns["mask_ids"] = _lists("i", masks, kept)
        counts = (row.track.mask_counts[row.start : row.stop] for row in rows)
        columns["mask_counts"] = _lists("B", tokens, counts)
    if any(row.track.routes for row in rows):
        routes = [row.track.routes[row.start : row.stop] for row in rows]
        columns["route"] = pa.array(list(map(route_name, routes)))
        columns["routes"] = lists(list(map(as_bytes, routes)), pa.uint8())
        columns["prompt_routes"] = lists([as_bytes(row.prompt_routes) for row in rows], pa.uint8())
    return pa.record_batch(
        [columns.get(field.name, pa.nulls(len(rows), field.type)) for field in SCHEMA], schema=SCHEMA
    )


def _lists(typecode: str, lengths: list[int], pieces: Iterable[array]) -> pa.Array:
    """Return an array with one list for each piece."""
    joined_pieces = array(typecode)
    for piece in pieces:
        joined_pieces.extend(piece)
    offsets = np.cumsum([0, *lengths], dtype=np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(np.frombuffer(joined_pieces, typecode)))


# ---- reading ---------------------------------------------------------------------------------------------


class JournalContents(NamedTuple):
    """Tokens and routes that journals hold."""

    tracks: dict[str, Segment]
    """Tokens by the track's name; of two attempts, those of the attempt that got further."""
    prompt_routes: dict[RolloutKey, Routes]


def read_journals(files: Iterable[Path], prompt_ids: Collection[str]) -> JournalContents:
    """Return the contents for ``prompt_ids``. Files that hold none of them are not read."""
    found = JournalContents({}, {})
    for path in files:
        if not prompts_of(path).isdisjoint(prompt_ids):
            tracks, prompt_routes = _journaled(path, prompt_ids)
            for name, track in tracks.items():
                found.tracks[name] = max(found.tracks.get(name, track), track, key=len)
            found.prompt_routes.update(prompt_routes)
    return found


def prompts_of(path: Path) -> set[str]:
    """Return the ids of the prompts whose tracks a journal holds; none if it was removed."""
    return values(path, SCHEMA, "prompt_id") if path.exists() else set()


def _journaled(path: Path, prompt_ids: Collection[str]) -> JournalContents:
    parts: dict[str, list[Segment]] = {}
    prompts: dict[RolloutKey, Routes] = {}
    for batch in batches(path, SCHEMA):
        columns = [
            pieces(batch[field.name]) if pa.types.is_list(field.type) else batch[field.name].to_pylist()
            for field in SCHEMA
        ]
        for row_values in zip(*columns, strict=True):
            row = dict(zip(SCHEMA.names, row_values, strict=True))
            if row["prompt_id"] in prompt_ids:
                parts.setdefault(row["track"], []).append(_piece(row))
                routes = from_bytes(row["route"], row["prompt_routes"])
                if routes is not None:
                    prompts[rollout_of(row["track"])] = routes
    return JournalContents({name: _joined(segments) for name, segments in parts.items()}, prompts)


def _piece(row: dict[str, Any]) -> Segment:
    counts = row["mask_counts"]
    return Segment(
        row["token_ids"],
        row["logprobs"],
        sampling_mask=None if counts is None else SamplingMask(row["mask_ids"], counts),
        routes=from_bytes(row["route"], row["routes"]),
        versions=((0, row["policy_version"]),),
    )


def _joined(parts: Sequence[Segment]) -> Segment:
    masks = [part.sampling_mask for part in parts if part.sampling_mask is not None]
    routes = [part.routes for part in parts if part.routes is not None]
    return Segment(
        joined([part.token_ids for part in parts]),
        joined([part.logprobs for part in parts]),
        sampling_mask=SamplingMask.joined(masks) if masks else None,
        routes=joined(routes) if routes else None,
        versions=joined_versions((len(part), part.versions) for part in parts),
    )
