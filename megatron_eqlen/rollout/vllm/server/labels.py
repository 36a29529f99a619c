"""Policy versions of the tokens of a request that weight syncs interrupted.

A server sends tokens a few at a time: some that it sampled before a sync arrive after it, in one event with
newer ones. So the client asks it, while it is paused, how many tokens each request has.
"""

from __future__ import annotations

import secrets
from collections import deque
from dataclasses import replace

from megatron_eqlen.types import Delta


class Labels:
    """The policy versions of one request's tokens, for its deltas in the order in which they arrive.

    ``version``: the weights in use when the request was submitted.
    """

    def __init__(self, version: int) -> None:
        self.ticket = secrets.token_hex(8)
        """The request's name in the server's workers (``engine.TICKET``)."""
        self.version = version
        self._arrived = 0
        self._before: deque[tuple[int, int]] = deque()
        """(tokens, version) of the syncs that still matter: tokens before this number have this version."""

    def sync(self, sampled: int, version: int) -> None:
        """Give ``version`` to all tokens after the ``sampled`` first ones."""
        self._before.append((sampled, self.version))
        self.version = version

    def label(self, delta: Delta) -> list[Delta]:
        """Return the delta with its policy version, cut into pieces where the version changes."""
        pieces = []
        while self._before and self._arrived + len(delta.token_ids) > self._before[0][0]:
            stop, version = self._before.popleft()
            if stop > self._arrived:
                piece, delta = cut(delta, stop - self._arrived)
                pieces.append(replace(piece, policy_version=version))
                self._arrived = stop
        self._arrived += len(delta.token_ids)
        delta.policy_version = self._before[0][1] if self._before else self.version
        return [*pieces, delta]


def cut(delta: Delta, tokens: int) -> tuple[Delta, Delta]:
    """Return two deltas: the first ``tokens`` tokens with the prompt's data, and the rest with the finish
    reason."""
    first, rest = (
        {
            "token_ids": delta.token_ids[within],
            "columns": {name: values[within] for name, values in delta.columns.items()},
        }
        for within in (slice(tokens), slice(tokens, None))
    )
    return (
        replace(delta, **first, finish_reason=None, num_cached_tokens=None),
        replace(delta, **rest, path={}),
    )
