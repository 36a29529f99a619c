"""Routes of paths that several requests computed (``rollout.keep_routes``).

A path has one row of routes for each position: that of the newest prefill. A request under new weights (of a
rollout that an earlier step began, or lost across a weight sync) computes the whole path again, and the new
tokens rest on the experts that the new weights chose for it; so the request brings these rows, and they
replace the older ones. The older tokens of the path have log-probs from older experts. Their ratio trainer /
engine compares two policies, and the routers belong to the policy: the new weights with the experts that they
choose are the policy that is trained, and the old weights with theirs the one that sampled. The new weights
with the experts of old ones are neither.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

import numpy as np

from megatron_eqlen.rollout.engine import Decoder, EngineError
from megatron_eqlen.rollout.meter import Meter
from megatron_eqlen.sampling.harvester import Harvester
from megatron_eqlen.sampling.track import Track
from megatron_eqlen.tokens import ROUTES, Tokens
from megatron_eqlen.types import Delta, RolloutKey

PROMPT = (-1, 0)
"""Key of the prompt in ``Rerouting.prefills``."""


class PathRequest(NamedTuple):
    """Rows of its path that a request brings."""

    rows: int
    used: int
    """The first rows, which replace known ones or are new; tokens after them have theirs."""
    version: int
    """Policy version whose prefill computes them."""


class Rerouting:
    """Keeps the routes of all paths of a harvest."""

    def __init__(
        self,
        engine: Decoder,
        meter: Meter,
        running: Mapping[RolloutKey, Harvester],
        resumed: Collection[RolloutKey],
    ) -> None:
        self.engine, self.meter, self.running = engine, meter, running
        self.resumed = resumed
        """Rollouts that an earlier step began."""
        self.requests: dict[str, PathRequest] = {}
        """Requests in flight that bring rows of their path."""
        self.prefills: dict[RolloutKey, dict[tuple[int, int], int]] = {}
        """Policy version whose prefill chose the first rows of a part's routes, where it is not the one that
        sampled its tokens; by the number of the part and of these rows, or ``PROMPT``."""

    def check_resumed(self, track: Track) -> None:
        """Drop the last token of a track that weights in use ended and older weights had begun, to be
        generated again: the record has its tokens, but not the routes that the weights in use chose for the
        older ones."""
        if not len(track) or not track.keeps_columns:
            return
        tokens, current = track.tokens, self.engine.policy_version
        if track.finish_reason is not None and tokens.version == current and not tokens.sampled_by(current):
            track.reopen()

    def rows_of(self, track: Track, key: RolloutKey) -> int:
        """Return the number of rows that a track's new request brings of its path: those of all positions, or
        0. They are used up to the end of the prompt in the first request of a rollout, and to the end of the
        path where older weights chose some of the routes."""
        version, prompt = self.engine.policy_version, self.running[key].prompt
        prefills = self.prefills.setdefault(key, {})
        rows = len(track.path) - 1
        if self._has_older(track, key, version):
            used = rows
        elif self.running[key].prompt_columns is None and PROMPT not in prefills:
            used = len(prompt.token_ids) - 1
        else:
            return 0
        prefills[PROMPT] = version
        self.requests[track.request_id] = PathRequest(rows, used, version)
        return rows

    def _has_older(self, track: Track, key: RolloutKey, version: int) -> bool:
        """Return True if weights other than those of ``version`` chose routes of a track's path."""
        harvester, prefills = self.running[key], self.prefills[key]
        resumed = harvester.prompt_columns is not None and key in self.resumed
        if prefills.get(PROMPT, -1 if resumed else version) != version:
            return True
        if not track.tokens.sampled_by(version):
            return True
        return any(
            prefills[part.number, shared] != version
            if (part.number, shared) in prefills
            else not part.tokens.sampled_by(version)
            for _, part, shared in harvester.parts_along(track)
        )

    def take(self, track: Track, key: RolloutKey, delta: Delta) -> None:
        """Take the routes of a track's path from the first tokens of a request that brings them."""
        if (request := self.requests.pop(delta.request_id, None)) is None:
            return
        rows = _asked(delta, request.rows)[: request.used]
        harvester, prefills = self.running[key], self.prefills[key]
        prompt = len(harvester.prompt.token_ids)
        older: list[np.ndarray] = []
        newer: list[np.ndarray] = []
        # prompt: its first token is not predicted
        if harvester.prompt_columns is not None:
            older.append(harvester.prompt_columns[ROUTES.name][1:])
            newer.append(rows[: prompt - 1])
        of_prompt = np.concatenate([np.zeros_like(rows[:1], shape=(1, *rows.shape[1:])), rows[: prompt - 1]])
        track.prompt_columns = harvester.prompt_columns = Tokens({ROUTES.name: of_prompt})
        # finished parts
        for start, part, shared in harvester.parts_along(track):
            first = prompt - 1 + start
            if first + shared > len(rows):
                continue
            prefills[part.number, 1] = prefills[part.number, shared] = request.version
            tokens = part.tokens
            if ROUTES.name in tokens:
                known, chosen = tokens[ROUTES.name], rows[first : first + shared]
                part.tokens = tokens.with_column(ROUTES.name, np.concatenate([chosen, known[shared:]]))
                older.append(known[:shared])
                newer.append(chosen)
        # the track's own tokens
        own = rows[len(track.context) - 1 :]
        if len(own) and track.keeps_columns:
            older.append(track.tokens.values(ROUTES.name, len(own)))
            newer.append(own)
            track.tokens.replace(ROUTES.name, own)
        if older:
            self.meter.rerouted(np.concatenate(older), np.concatenate(newer))

    def lose(self, request_id: str, key: RolloutKey) -> None:
        """Forget a request that the engine gave up."""
        if self.requests.pop(request_id, None) is not None:
            self.prefills[key].pop(PROMPT, None)

    def end(self, key: RolloutKey) -> None:
        """Forget a rollout that runs no more."""
        self.prefills.pop(key, None)


def _asked(delta: Delta, expected: int) -> np.ndarray:
    """Return the routes of its path that a request asked for. Raises EngineError where rows are missing."""
    found = delta.path.get(ROUTES.name)
    if found is None or len(found) != expected:
        raise EngineError(
            f"request {delta.request_id}: expected routes of the first {expected} positions of its path, "
            f"found {0 if found is None else len(found)}"
        )
    return found
