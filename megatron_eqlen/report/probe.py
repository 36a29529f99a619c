"""Results of a probe: values of prefixes, changes along responses, and advantages that agree with them.

    record of a probe ─► values (mean reward of the continuations of a place) ─► changes along responses
                                                                                     │
    the step's rollouts ─► advantages of every objective on the same tokens ─────────┴─► audit

Nothing recorded behind a place is among its continuations, so a change between two places is a difference of
two independent means; the last change of a response is its own reward less the value of its last place.
"""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from megatron_eqlen.evaluation.statistics import Interval, change_of_mean
from megatron_eqlen.job import Job
from megatron_eqlen.objectives.audit import Agreement, Change, audit
from megatron_eqlen.report.rollouts import Decode
from megatron_eqlen.sampling.comparison import response_reward
from megatron_eqlen.sampling.probe import PIECE, PROBE
from megatron_eqlen.types import UNSCORED, Part, Rollout, rollout_key, tokens_along

LineKey = tuple[str, int, int]
"""Key of a rollout, and the number of a response's last part in it."""
QUARTERS = (0.0, 0.25, 0.5, 0.75, 1.0)
SHOWN = 5
"""Responses that are printed."""


@dataclass(frozen=True)
class Stretch:
    """Tokens of a response between two places, or from the last place to its end."""

    begin: int
    """Generated tokens of the response before it."""
    end: int
    token_ids: tuple[int, ...]
    change: Interval
    """Change of the value across it."""

    @property
    def sure(self) -> bool:
        """True if the interval excludes 0."""
        return self.change.low > 0 or self.change.high < 0


@dataclass(frozen=True)
class Probed:
    """A recorded response, with the values of its places."""

    prompt_id: str
    index: int
    part: int
    """Number of its last part in the record of the step."""
    weight: float
    reward: float
    values: tuple[np.ndarray, ...]
    """Rewards of the continuations of each place, the prompt's first."""
    stretches: tuple[Stretch, ...]

    @property
    def length(self) -> int:
        return self.stretches[-1].end

    def undecided(self, share: float) -> float:
        """Return the unbiased variance of the reward after this share of the response, on straight lines
        between places; 0 at its end."""
        at = [*(stretch.begin for stretch in self.stretches), self.length]
        variances = [*(rewards.var(ddof=1) for rewards in self.values), 0.0]
        return float(np.interp(share * self.length, at, variances))


@dataclass(frozen=True)
class Found:
    """All responses of a probe, and what estimators say of them."""

    responses: tuple[Probed, ...]
    agreements: tuple[Agreement, ...]

    @cached_property
    def decided(self) -> list[float]:
        """Share of the reward's variance that is decided in each quarter of a response; NaN without any."""
        weights = np.array([response.weight for response in self.responses])
        left = [
            float(weights @ [response.undecided(share) for response in self.responses]) for share in QUARTERS
        ]
        return [(a - b) / left[0] if left[0] > 0 else float("nan") for a, b in itertools.pairwise(left)]

    def as_json(self) -> dict[str, Any]:
        found = {
            "responses": [_response_json(response) for response in self.responses],
            "decided_by_quarter": self.decided,
            "objectives": [agreement._asdict() for agreement in self.agreements],
        }
        return json.loads(json.dumps(found), parse_constant=lambda _: None)  # JSON has no NaN

    def text(self, decode: Decode) -> str:
        """Return tables: the responses that changed most, quarters, and estimators."""
        lines: list[str] = []
        largest = sorted(self.responses, key=_largest, reverse=True)[:SHOWN]
        for response in largest:
            value = response.values[0]
            lines += [
                "",
                f"{response.prompt_id}/{response.index}: reward {response.reward:g}, "
                f"value of the prompt {value.mean():.2f} ({len(value)} continuations)",
                *(
                    f"{_signed(stretch.change):>22}{'*' * stretch.sure:1} {decode(stretch.token_ids)!r}"
                    for stretch in response.stretches
                ),
            ]
        shares = ", ".join(f"{share:.0%}" for share in self.decided)
        lines += [
            "",
            "* its 95% interval excludes 0",
            f"the reward is decided, by quarters of a response: {shares}",
        ]
        lines += ["", "  sign    rank  bias early, late noise  objectives"]
        return "\n".join([*lines, *(agreement.row for agreement in self.agreements)])


def look(
    probed: Sequence[Rollout], rollouts: Sequence[Rollout], lines: Collection[LineKey], job: Job
) -> Found:
    """Return what the record of a probe says of some responses, ``lines``, of a step's ``rollouts``, which a
    run of ``job`` trained."""
    recorded = {rollout_key(rollout): rollout for rollout in rollouts}
    responses = [
        response
        for rollout in probed
        for response in _responses(
            rollout, recorded[rollout_key(rollout)], job.recipe.reward.on_error == "zero"
        )
        if (*rollout_key(rollout), response.part) in lines
    ]
    changes = [
        Change(
            recorded[response.prompt_id, response.index],
            response.part,
            stretch.begin,
            stretch.end,
            stretch.change.mean,
            stretch.sure,
        )
        for response in responses
        for stretch in response.stretches
    ]
    return Found(tuple(responses), tuple(audit(changes, rollouts, job.recipe)) if changes else ())


def _responses(probed: Rollout, recorded: Rollout, unscored_too: bool) -> Iterator[Probed]:
    """Yield all responses of a rollout; none if its prompt has fewer than two rewards. ``recorded``: the
    rollout whose parts were cut and continued; ``unscored_too``: what has no reward counts as its 0."""
    values: dict[int, list[float]] = defaultdict(list)
    for part in probed.parts:
        if part.role == PROBE and (unscored_too or not (part.grade and part.grade.verdict == UNSCORED)):
            values[part.parent].append(response_reward(part, probed.prompt_id))
    known = {piece: np.array(rewards) for piece, rewards in values.items() if len(rewards) > 1}
    if -1 not in known:
        return
    pieces = [part for part in probed.parts if part.role != PROBE]
    weights = recorded.weights()
    for last in {piece.number for piece in pieces} - {piece.parent for piece in pieces}:
        if (end := probed.line(last))[-1].finish_reason is not None:
            number = int(end[-1].role.removeprefix(PIECE))
            key = probed.prompt_id, probed.index, number
            yield _response(key, weights[number], end, known)


def _response(key: LineKey, weight: float, line: Sequence[Part], values: Mapping[int, np.ndarray]) -> Probed:
    """Return a response from its pieces and the rewards of their continuations."""
    reward = response_reward(line[-1], key[0])
    # pieces between places: [prompt or the end of a piece with continuations, the next one)
    stretches, at, begin, pending = list[Stretch](), [values[-1]], 0, list[Part]()
    for piece in line:
        pending.append(piece)
        end = begin + sum(map(len, pending))
        after = np.array([reward]) if piece is line[-1] else values.get(piece.number)
        if after is None:
            continue
        ids = tokens_along(pending)
        stretches.append(Stretch(begin, end, tuple(ids.tolist()), change_of_mean(at[-1], after)))
        at.append(after)
        begin, pending = end, []
    return Probed(*key, weight, reward, tuple(at[:-1]), tuple(stretches))


def _largest(response: Probed) -> float:
    return max(abs(stretch.change.mean) for stretch in response.stretches)


def _signed(change: Interval) -> str:
    return f"{change.mean:+.2f} [{change.low:+.2f}, {change.high:+.2f}]"


def _response_json(response: Probed) -> dict[str, Any]:
    return {
        "prompt_id": response.prompt_id, "index": response.index, "part": response.part,
        "weight": response.weight, "reward": response.reward,
        "values": [[float(value.mean()), len(value)] for value in response.values],
        "stretches": [
            {"begin": s.begin, "end": s.end, "change": [s.change.mean, s.change.low, s.change.high]}
            for s in response.stretches
        ],
    }  # fmt: skip
