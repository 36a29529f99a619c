"""Routes of prompts (``rollout.keep_routes``): the first request of each rollout brings them. Generated
tokens bring their own, and keep them when newer weights continue their path: as its log-prob, a token's
experts are those of the weights that sampled it."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from megatron_eqlen.engines.protocol import EngineError
from megatron_eqlen.sampling.harvester import Harvester
from megatron_eqlen.sampling.track import Track
from megatron_eqlen.tokens import ROUTES, Tokens
from megatron_eqlen.types import Delta, RolloutKey


class PromptRoutes:
    """Requests in flight that bring the routes of a prompt, at most one for each rollout."""

    def __init__(self, running: Mapping[RolloutKey, Harvester], kept: bool) -> None:
        self.running, self.kept = running, kept
        self.requests: dict[RolloutKey, tuple[str, int]] = {}
        """Id of the request, and the number of rows that it brings."""

    def rows_of(self, track: Track) -> int:
        """Return the number of rows that a track's request brings: all positions of its path, or 0."""
        if not self.kept or self.running[track.key].prompt_columns is not None or track.key in self.requests:
            return 0
        rows = len(track.path) - 1
        self.requests[track.key] = track.request_id, rows
        return rows

    def take(self, track: Track, delta: Delta) -> None:
        """Take the prompt's routes from its request's first tokens. Raises EngineError for missing rows."""
        request_id, expected = self.requests[track.key]
        if request_id != delta.request_id:
            return
        del self.requests[track.key]
        rows = delta.path.get(ROUTES.name)
        if rows is None or len(rows) != expected:
            wanted = f"expected routes of the first {expected} positions of its path"
            found = 0 if rows is None else len(rows)
            raise EngineError(f"request {delta.request_id}: {wanted}, found {found}")
        # a resumed path is longer than its prompt; its generated tokens have their own routes
        harvester = self.running[track.key]
        rows = rows[: len(harvester.prompt.token_ids) - 1]
        first = np.zeros((1, *rows.shape[1:]), rows.dtype)  # a prompt's first token is not predicted
        columns = Tokens({ROUTES.name: np.concatenate([first, rows])})
        track.prompt_columns = harvester.prompt_columns = columns

    def lose(self, track: Track) -> None:
        """Forget a track's request, which the engine gave up."""
        if self.requests.get(track.key, ("", 0))[0] == track.request_id:
            del self.requests[track.key]
