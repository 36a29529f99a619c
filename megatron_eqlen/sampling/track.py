"""One decoding path: the tokens of one request (or of several, where an engine lost one on the way).

A track's end is decided here, by position, not by what the engine says: ``stop`` at the first token of the
end-of-sequence set, ``length`` when the path is full; later tokens are cut. With an environment that token
ends a turn, which the environment answers or makes the track's last. Lengths count generated tokens.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from megatron_eqlen.tokens import ALWAYS, GIVEN, GrowingTokens, Tokens
from megatron_eqlen.types import Delta, FinishReason, Grade, Prompt


def track_seed(seed: int, prompt_id: str, index: int, number: int) -> int:
    """Return the seed of track ``number`` of a prompt's rollout, in [0, 2^63): the same on every machine."""
    name = f"{seed}|{prompt_id}|{index}|{number}".encode()
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest()) >> 1


class Track:
    """A track continues ``context`` by at most ``limit`` tokens."""

    __slots__ = (
        "age", "attempts", "awaited", "awaits_answer", "context", "eos_token_ids", "finish_reason", "forks",
        "given", "grade", "is_fork", "keeps_columns", "key", "limit", "name", "number", "parent",
        "prompt_columns", "seed", "start", "takes_turns", "tokens",
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
        parent: int = -1,
    ) -> None:
        self.key = prompt.prompt_id, index
        """Key of its rollout."""
        self.name = f"{prompt.prompt_id}/{index}/{number}"
        self.number = number
        """Number of the track in its rollout."""
        self.seed = track_seed(seed, prompt.prompt_id, index, number)
        # what the request starts with; `tokens` holds only what comes behind it
        self.context = prompt.token_ids + trunk
        self.limit = limit
        self.awaited = limit
        """Length at which the harvester may decide something, wherever the track ends."""
        self.eos_token_ids = eos_token_ids
        self.is_fork = bool(trunk)
        self.forks: tuple[int, ...] = ()
        """Numbers of the tracks from the first fork down to this one; none for a first track."""
        self.tokens = GrowingTokens()
        self.start = 0
        """Number of generated tokens that are in parts of the rollout."""
        self.parent = parent
        """Number of the part that the other tokens continue, -1 for the prompt."""
        self.prompt_columns: Tokens | None = None
        """Columns of the rollout's prompt, where this track's request brought them."""
        self.keeps_columns = True
        """False on a rank that neither records nor trains the rollout: it keeps ``ALWAYS`` only."""
        self.finish_reason: FinishReason | None = None
        self.takes_turns = False
        """True if an environment answers the ends of turns."""
        self.awaits_answer = False
        """True if the last token ends a turn that the environment has not answered."""
        self.given = 0
        """Number of ``tokens`` that an environment gave."""
        self.grade: Grade | None = None
        """The environment's grade of the response that has ended."""
        self.attempts = 0
        self.age = 0
        """Steps since the one that drew the prompt."""

    def __len__(self) -> int:
        """Return the number of generated tokens."""
        return len(self.tokens.token_ids) - self.given

    @property
    def token_ids(self) -> array[int]:
        """Token ids after ``context``; not to be written to."""
        return self.tokens.token_ids

    @property
    def generated_ids(self) -> Sequence[int]:
        """Token ids that the policy generated; not to be written to."""
        if not self.given:
            return self.token_ids
        tokens = self.tokens[:]
        return tokens.token_ids[tokens.is_generated].tolist()

    @property
    def request_id(self) -> str:
        """Id of the track's request: new with every attempt, step and turn, so late deltas are ignored."""
        name = f"{self.name}+{self.age}" if self.age else self.name
        name = f"{name}:{self.given}" if self.given else name
        return f"{name}~{self.attempts}" if self.attempts else name

    @property
    def path(self) -> list[int]:
        """All token ids, from the prompt's first on; not to be written to."""
        return self.context + self.token_ids.tolist() if self.token_ids else self.context

    @property
    def remaining(self) -> int:
        return self.limit - len(self)

    def extend(self, delta: Delta, version: int | list[int]) -> bool:
        """Take a delta's tokens up to the end of the track; return True if it ended or reached ``awaited``.
        Runs once a token. ``version``: of the weights, or one each. Raises ValueError for missing values."""
        tokens = self.tokens
        columns: Mapping[str, Any] = delta.columns if self.keeps_columns else {}
        if self.takes_turns:
            columns = {**columns, GIVEN.name: [()] * len(delta.token_ids)}
        tokens.append(delta.token_ids, columns, version)
        length = len(tokens.token_ids)
        # neither a limit nor an end of sequence
        if length - self.given < self.awaited and self.eos_token_ids.isdisjoint(delta.token_ids):
            return False
        self._end(first=length - len(delta.token_ids))
        return True

    def answer(self, token_ids: list[int], turn: int) -> None:
        """Append an environment's answer to turn number ``turn``, or end the track if no token can follow."""
        self.awaits_answer = False
        if not self.remaining:
            self.finish_reason = "length"
            return
        # these tokens were not sampled: their columns have no values, and the version is the last token's
        columns = self.tokens.blank(len(token_ids))
        columns[GIVEN.name] = [(turn,)] * len(token_ids)
        self.tokens.append(token_ids, columns, self.tokens.versions[-1])
        self.given += len(token_ids)

    def finish(self, grade: Grade | None) -> None:
        """End the track with the turn that it has ended."""
        self.awaits_answer, self.finish_reason, self.grade = False, "stop", grade

    def place(self, length: int) -> int:
        """Return the place in ``tokens`` after so many generated ones, with an environment's answer."""
        if not self.given:
            return length
        # [generated] place of each generated token; the next one lies behind the environment's answer
        places = np.flatnonzero(self.tokens[:].is_generated)
        return int(places[length]) if length < len(places) else len(self.tokens)

    @property
    def end_generated(self) -> int:
        """Number of ``tokens`` up to the last one that the policy generated."""
        return int(np.flatnonzero(self.tokens[:].is_generated)[-1]) + 1 if self.given else len(self.tokens)

    def resume(self, known: Tokens) -> None:
        """Take the tokens of an earlier attempt at this track, or of an earlier step."""
        self.tokens.extend(known if self.keeps_columns else known.only(ALWAYS))
        self.given = len(known) - known.generated
        # turns before an environment's last token are answered
        self._end(first=int(np.flatnonzero(~self.tokens[:].is_generated)[-1]) + 1 if self.given else 0)

    def _end(self, first: int) -> None:
        """Find the end of the track among the tokens from number ``first`` on, and cut later tokens."""
        self.awaited = self.limit
        token_ids = self.token_ids
        end = self.limit + self.given  # of the tokens
        known = range(first, min(len(token_ids), end))
        # the first end of sequence before the limit, if any
        stop = next((n for n in known if token_ids[n] in self.eos_token_ids), end)
        if stop < end and self.takes_turns:
            self.awaits_answer = True
        elif stop < end:
            self.finish_reason = "stop"
        elif len(token_ids) >= end:
            self.finish_reason = "length"
        self.tokens.cut(min(stop + 1, end))
