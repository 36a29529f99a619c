"""One decoding path: the tokens of one request (or of several, where an engine lost one on the way).

A track's end is decided here, by position, not by what the engine says: ``stop`` at the first token of
the end-of-sequence set, ``length`` when the path is full. Tokens that an engine sends after that are cut.
"""

from __future__ import annotations

import hashlib
from array import array

import numpy as np

from megatron_eqlen.types import (
    Delta,
    FinishReason,
    Placeholder,
    Prompt,
    Routes,
    SamplingMask,
    Segment,
    Versions,
    joined_versions,
    versions_within,
)


def track_seed(seed: int, prompt_id: str, index: int, number: int) -> int:
    """Return a seed in [0, 2^63) for track ``number`` of rollout ``index`` of a prompt: the same on every
    machine."""
    name = f"{seed}|{prompt_id}|{index}|{number}".encode()
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest()) >> 1


def rollout_of(name: str) -> tuple[str, int]:
    """Return the key of the rollout that a ``Track.name`` belongs to: the prompt's id and the rollout's
    number."""
    prompt_id, index, _ = name.rsplit("/", 2)
    return prompt_id, int(index)


class RouteRows:
    """``Routes`` that grow by a few rows at a time."""

    __slots__ = ("_bytes", "_dtype", "_row", "_width")

    def __init__(self) -> None:
        self._bytes = bytearray()
        self._row, self._dtype, self._width = (0, 0), np.dtype(np.uint8), 1

    def __len__(self) -> int:
        return len(self._bytes) // self._width

    def extend(self, rows: Routes) -> None:
        if not self._bytes:
            self._row, self._dtype = rows.shape[1:], rows.dtype
            self._width = max(1, int(np.prod(self._row)) * rows.itemsize)
        self._bytes += rows.tobytes()

    def replace(self, rows: Routes) -> None:
        """Put ``rows`` in the place of the first rows."""
        self._bytes[: len(rows) * self._width] = rows.tobytes()

    def cut(self, end: int) -> None:
        """Drop the rows from number ``end`` on."""
        del self._bytes[end * self._width :]

    def __getitem__(self, part: slice) -> Routes:
        start, stop, _ = part.indices(len(self))
        data = self._bytes[start * self._width : stop * self._width]
        return np.frombuffer(data, self._dtype).reshape(-1, *self._row)


class Track:
    """A track continues ``context`` by at most ``limit`` tokens.

    Tokens are collected in ``array.array``s of the records' types: 8 bytes a token where lists take 72, and
    nearly as fast to append to.
    """

    __slots__ = (
        "age", "attempts", "awaited", "context", "eos_token_ids", "finish_reason", "is_fork", "keeps_columns",
        "limit", "logprobs", "mask_counts", "mask_ids", "name", "number", "prompt_id", "prompt_routes",
        "routes", "runs", "seed", "token_ids",
    )  # fmt: skip

    def __init__(
        self,
        prompt: Prompt,
        index: int,
        number: int,
        trunk: list[int],
        limit: int,
        eos_token_ids: frozenset[int],
        seed: int,
    ) -> None:
        self.prompt_id = prompt.prompt_id
        self.name = f"{prompt.prompt_id}/{index}/{number}"
        self.number = number
        """Number of the track in its rollout."""
        self.seed = track_seed(seed, prompt.prompt_id, index, number)
        self.context = prompt.token_ids + trunk
        self.limit = limit
        self.awaited = limit
        """Length at which the harvester may decide something, wherever the track ends."""
        self.eos_token_ids = eos_token_ids
        self.is_fork = bool(trunk)
        self.token_ids = array("i")
        self.logprobs = array("f")
        self.mask_ids = array("i")
        self.mask_counts = array("B")
        """Same length as ``token_ids``; empty if the engine records no sampling mask."""
        self.routes = RouteRows()
        """Same length as ``token_ids``; empty if the engine records no routes."""
        self.prompt_routes: Routes | None = None
        """Routes of the rollout's prompt, where this track's request brought them."""
        self.runs: list[tuple[int, int]] = []
        """Policy versions of the tokens, as ``types.Versions``."""
        self.keeps_columns = True
        """False on a rank that neither records nor trains the rollout: it keeps no log-probs, masks and
        routes."""
        self.finish_reason: FinishReason | None = None
        self.attempts = 0
        self.age = 0
        """Steps since the one that drew the prompt."""

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def request_id(self) -> str:
        """Id of the track's request, new with every attempt and step, so that a late delta of a request that
        was lost or aborted is ignored."""
        name = f"{self.name}+{self.age}" if self.age else self.name
        return f"{name}~{self.attempts}" if self.attempts else name

    @property
    def path(self) -> list[int]:
        """All token ids, from the prompt's first on; not to be written to."""
        return self.context + self.token_ids.tolist() if self.token_ids else self.context

    @property
    def remaining(self) -> int:
        return self.limit - len(self.token_ids)

    def extend(self, delta: Delta, version: int) -> bool:
        """Take a delta's tokens, sampled by weights of ``version``, up to the end of the track; return True
        if the track ended now or reached ``awaited``.

        Runs once a token of every response, and nearly always nothing ends: that case is found first.
        """
        if delta.token_ids and (not self.runs or self.runs[-1][1] != version):
            self.runs.append((len(self.token_ids), version))
        self.token_ids.fromlist(delta.token_ids)
        if self.keeps_columns:
            self.logprobs.fromlist(delta.logprobs)
            for kept in delta.sampling_mask or ():
                self.mask_ids.extend(kept)
                self.mask_counts.append(len(kept))
            if delta.routes is not None:
                self.routes.extend(delta.routes)
        if len(self.token_ids) < self.awaited and self.eos_token_ids.isdisjoint(delta.token_ids):
            return False
        self._end(first=len(self.token_ids) - len(delta.token_ids))
        return True

    def resume(self, known: Segment) -> None:
        """Take the tokens of an earlier attempt at this track, or of an earlier step."""
        self.runs = list(joined_versions([(len(self), tuple(self.runs)), (len(known), known.versions)]))
        self.token_ids.frombytes(known.token_ids.tobytes())
        if self.keeps_columns:
            self.logprobs.frombytes(known.logprobs.tobytes())
        if self.keeps_columns and known.sampling_mask is not None:
            self.mask_ids.frombytes(known.sampling_mask.ids.tobytes())
            self.mask_counts.frombytes(known.sampling_mask.counts.tobytes())
        if self.keeps_columns and known.routes is not None:
            self.routes.extend(known.routes)
        self._end(first=0)

    def _end(self, first: int) -> None:
        """Find the end of the track among the tokens from number ``first`` on, and cut later tokens."""
        self.awaited = self.limit
        stop = next(
            (n for n in range(first, len(self.token_ids)) if self.token_ids[n] in self.eos_token_ids),
            self.limit,
        )
        if stop < self.limit:
            self.finish_reason = "stop"
        elif len(self.token_ids) >= self.limit:
            self.finish_reason = "length"
        self._cut(min(stop + 1, self.limit))

    def reopen(self) -> None:
        """Drop the last token of a track that has ended, to be generated again."""
        self.finish_reason = None
        self._cut(len(self) - 1)

    def _cut(self, end: int) -> None:
        """Drop the tokens from number ``end`` on."""
        del self.mask_ids[len(self.mask_ids) - sum(self.mask_counts[end:]) :]
        for column in (self.token_ids, self.logprobs, self.mask_counts):
            del column[end:]
        self.routes.cut(end)
        self.runs = list(self.versions(0, end))

    def segment(self, start: int, stop: int | None = None) -> Segment:
        """Return tokens ``start`` to ``stop`` of this track; the finish reason belongs to its last token."""
        stop = len(self.token_ids) if stop is None else stop
        token_ids = np.frombuffer(self.token_ids[start:stop], np.int32)
        logprobs = np.frombuffer(self.logprobs[start:stop], np.float32)
        return Segment(
            token_ids,
            logprobs if self.keeps_columns else Placeholder.of(token_ids),
            self.finish_reason if stop == len(self.token_ids) else None,
            sampling_mask=self._mask(start, stop) if self.mask_counts else None,
            routes=self.routes[start:stop] if self.routes else None,
            versions=self.versions(start, stop),
        )

    def versions(self, start: int, stop: int) -> Versions:
        """Return the versions of tokens ``start`` to ``stop``."""
        return versions_within(self.runs, start, stop)

    def _mask(self, start: int, stop: int) -> SamplingMask:
        before, within = _sum(self.mask_counts[:start]), _sum(self.mask_counts[start:stop])
        ids, counts = self.mask_ids[before : before + within], self.mask_counts[start:stop]
        return SamplingMask(np.frombuffer(ids, np.int32), np.frombuffer(counts, np.uint8))


def _sum(counts: array[int]) -> int:
    return int(np.frombuffer(counts, np.uint8).sum(dtype=np.int64))
