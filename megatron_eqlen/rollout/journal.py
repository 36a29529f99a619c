"""Tokens of unfinished rollouts on disk, so that a harvest that is killed loses its last seconds only.

    step-00000012/journal-rank-0.arrow       beside rank-0.arrow; removed when the harvest has ended
    step-00000012/suspended-rank-0.arrow     in the same format, of the rollouts that the harvest suspended

A row holds the tokens that one track got since its last row, those of each policy version in a row of their
own; a batch, those of all tracks at one moment. What a harvester makes depends on the tokens of its tracks
alone, so they are all that is recorded: a new attempt gives its tracks the tokens that they had, its
harvesters cut the same parts, and the engine goes on where the tokens end.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from megatron_eqlen.files import replaced
from megatron_eqlen.rollout.arrow_log import VERSION, VERSION_KEY, ArrowLog, batches, lists, pieces, values
from megatron_eqlen.rollout.route_columns import as_bytes, from_bytes, route_name
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
"""Then the name of the file of rollouts."""

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


class News(NamedTuple):
    """Tokens ``start`` to ``stop`` of a track, of one policy version, and where their mask's ids lie."""

    track: Track
    start: int
    stop: int
    mask_start: int
    mask_stop: int
    policy_version: int
    prompt_routes: Routes | None
    """Of the rollout's prompt, if they are news as well."""


class Journal:
    """Writes a new file; there is none before the first news.

    ``news`` is called where tracks grow and costs no more than a look at each; ``write`` copies the tokens,
    in a thread of its own: a track only ever grows, so what was news stays as it is.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: ArrowLog | None = None
        self._followed: dict[Track, tuple[int, int]] = {}
        """How many tokens, and how many ids of their masks, were news already."""
        self._prompts: set[RolloutKey] = set()
        """Rollouts whose prompt's routes were."""

    def follow(self, track: Track) -> None:
        """What ``track`` gets from now on is news until it has ended."""
        self._followed.setdefault(track, (len(track.token_ids), len(track.mask_ids)))

    def news(self) -> list[News]:
        """What the tracks got since the last call."""
        found = [
            one
            for track, (start, mask_start) in self._followed.items()
            if len(track.token_ids) > start
            for one in _news(track, start, mask_start, self._new_prompt_routes(track))
        ]
        self._followed |= {one.track: (one.stop, one.mask_stop) for one in found}
        for one in found:
            if one.track.finish_reason is not None:
                self._followed.pop(one.track, None)
        return found

    def _new_prompt_routes(self, track: Track) -> Routes | None:
        if track.prompt_routes is None or (key := rollout_of(track.name)) in self._prompts:
            return None
        self._prompts.add(key)
        return track.prompt_routes

    def write(self, news: Sequence[News]) -> None:
        if not news:
            return
        if self._file is None:
            self._file = ArrowLog(self.path, SCHEMA)
        self._file.write(_batch(news))

    def abandon(self) -> None:
        """Leave what is there to the next attempt."""
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
            prompt_routes = next((one.prompt_routes for one in tracks if one.prompt_routes is not None), None)
            news = (one for track in tracks if len(track) for one in _news(track, 0, 0, prompt_routes))
            file.write(_batch(list(news)))
        file.close()


def _news(track: Track, start: int, mask_start: int, prompt_routes: Routes | None) -> Iterator[News]:
    """All tokens of ``track`` from ``start`` on."""
    count = len(track.token_ids)
    for first, last, version in version_spans(track.versions(start, count), count - start):
        begin, stop = start + first, start + last
        mask_stop = mask_start + sum(track.mask_counts[begin:stop])
        yield News(track, begin, stop, mask_start, mask_stop, version, prompt_routes)
        mask_start, prompt_routes = mask_stop, None


def _batch(news: Sequence[News]) -> pa.RecordBatch:
    tokens = [one.stop - one.start for one in news]
    masks = [one.mask_stop - one.mask_start for one in news]
    columns = {
        "prompt_id": pa.array([one.track.prompt_id for one in news]),
        "track": pa.array([one.track.name for one in news]),
        "policy_version": pa.array([one.policy_version for one in news]),
        "token_ids": _lists("i", tokens, (one.track.token_ids[one.start : one.stop] for one in news)),
        "logprobs": _lists("f", tokens, (one.track.logprobs[one.start : one.stop] for one in news)),
    }
    if any(masks):
        kept = (one.track.mask_ids[one.mask_start : one.mask_stop] for one in news)
        columns["mask_ids"] = _lists("i", masks, kept)
        counts = (one.track.mask_counts[one.start : one.stop] for one in news)
        columns["mask_counts"] = _lists("B", tokens, counts)
    if any(one.track.routes for one in news):
        routes = [one.track.routes[one.start : one.stop] for one in news]
        columns["route"] = pa.array(list(map(route_name, routes)))
        columns["routes"] = lists(list(map(as_bytes, routes)), pa.uint8())
        columns["prompt_routes"] = lists([as_bytes(one.prompt_routes) for one in news], pa.uint8())
    return pa.record_batch(
        [columns.get(field.name, pa.nulls(len(news), field.type)) for field in SCHEMA], schema=SCHEMA
    )


def _lists(typecode: str, lengths: list[int], pieces: Iterable[array]) -> pa.Array:
    """One list for each piece."""
    together = array(typecode)
    for piece in pieces:
        together.extend(piece)
    offsets = np.cumsum([0, *lengths], dtype=np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(np.frombuffer(together, typecode)))


# ---- reading ---------------------------------------------------------------------------------------------


class Journaled(NamedTuple):
    """What journals hold."""

    tracks: dict[str, Segment]
    """Tokens by the track's name; of two attempts, of the one that got further."""
    prompt_routes: dict[RolloutKey, Routes]


def read_journals(files: Iterable[Path], prompt_ids: Collection[str]) -> Journaled:
    """What is there of ``prompt_ids``. Files that hold none of them are not read."""
    found = Journaled({}, {})
    for path in files:
        if not prompts_of(path).isdisjoint(prompt_ids):
            tracks, prompt_routes = _journaled(path, prompt_ids)
            for name, track in tracks.items():
                found.tracks[name] = max(found.tracks.get(name, track), track, key=len)
            found.prompt_routes.update(prompt_routes)
    return found


def prompts_of(path: Path) -> set[str]:
    """Ids of the prompts whose tracks a journal holds; none if it was removed."""
    return values(path, SCHEMA, "prompt_id") if path.exists() else set()


def _journaled(path: Path, prompt_ids: Collection[str]) -> Journaled:
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
    return Journaled({name: _whole(segments) for name, segments in parts.items()}, prompts)


def _piece(row: dict[str, Any]) -> Segment:
    counts = row["mask_counts"]
    return Segment(
        row["token_ids"],
        row["logprobs"],
        sampling_mask=None if counts is None else SamplingMask(row["mask_ids"], counts),
        routes=from_bytes(row["route"], row["routes"]),
        versions=((0, row["policy_version"]),),
    )


def _whole(parts: Sequence[Segment]) -> Segment:
    masks = [part.sampling_mask for part in parts if part.sampling_mask is not None]
    routes = [part.routes for part in parts if part.routes is not None]
    return Segment(
        joined([part.token_ids for part in parts]),
        joined([part.logprobs for part in parts]),
        sampling_mask=SamplingMask.joined(masks) if masks else None,
        routes=joined(routes) if routes else None,
        versions=joined_versions((len(part), part.versions) for part in parts),
    )
