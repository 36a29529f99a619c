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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from megatron_eqlen.evaluation.statistics import Interval, change_of_mean
from megatron_eqlen.files import expecting, read_json, step_name
from megatron_eqlen.job import Job
from megatron_eqlen.objectives.audit import Agreement, Change, audit
from megatron_eqlen.report.rollouts import Decode
from megatron_eqlen.sampling.comparison import response_reward
from megatron_eqlen.sampling.probe import FORCED, PIECE, PROBE
from megatron_eqlen.types import UNSCORED, Part, Rollout, RolloutKey, rollout_key, tokens_along

LineKey = tuple[str, int, int]
"""Key of a rollout, and the number of a response's last part in it."""
QUARTERS = (0.0, 0.25, 0.5, 0.75, 1.0)
FILE, FOUND = "probe.json", "found"
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


@dataclass(frozen=True, eq=False)
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
    def key(self) -> LineKey:
        return self.prompt_id, self.index, self.part

    @property
    def length(self) -> int:
        return self.stretches[-1].end

    @property
    def at(self) -> dict[int, np.ndarray]:
        """``values`` by the tokens of the response before."""
        return {stretch.begin: value for stretch, value in zip(self.stretches, self.values, strict=True)}

    def undecided(self, share: float) -> float:
        """Return the unbiased variance of the reward after this share of the response, on straight lines
        between places; 0 at its end."""
        at = [*(stretch.begin for stretch in self.stretches), self.length]
        variances = [*(rewards.var(ddof=1) for rewards in self.values), 0.0]
        return float(np.interp(share * self.length, at, variances))


@dataclass(frozen=True)
class Budget:
    """Mean reward where the end marker is forced in responses that lack it after so many tokens."""

    length: int | None
    """None: it is never forced."""
    forced: float
    """Share of the responses in which it is."""
    reward: Interval
    """Over prompts; over the responses of a single prompt."""
    prompts: Mapping[str, Interval]

    @property
    def cells(self) -> tuple[str, str, str]:
        """Cells of a table."""
        length = "never" if self.length is None else f"{self.length:,}"
        return length, f"{self.forced:.0%}", _unsigned(self.reward)


@dataclass(frozen=True)
class Found:
    """All responses of a probe, and what estimators say of them."""

    responses: tuple[Probed, ...]
    agreements: tuple[Agreement, ...]
    budgets: tuple[Budget, ...] = ()
    """Accuracy by length, where a probe forces an end marker; else empty."""

    @cached_property
    def decided(self) -> list[float]:
        """Share of the reward's variance that is decided in each quarter of a response; NaN without any."""
        weights = np.array([response.weight for response in self.responses])
        left = [
            float(weights @ [response.undecided(share) for response in self.responses]) for share in QUARTERS
        ]
        return [(a - b) / left[0] if left[0] > 0 else float("nan") for a, b in itertools.pairwise(left)]

    def as_json(self, decode: Decode) -> dict[str, Any]:
        found: dict[str, Any] = {"responses": [_response_json(r, decode) for r in self.responses]}
        if self.budgets:
            found["budgets"] = [asdict(budget) for budget in self.budgets]
        else:
            found["decided_by_quarter"] = self.decided
            found["objectives"] = [agreement._asdict() for agreement in self.agreements]
        return json.loads(json.dumps(found), parse_constant=lambda _: None)  # JSON has no NaN

    def text(self, decode: Decode) -> str:
        """Return tables: the responses that changed most, quarters, and estimators."""
        lines, shown = list[str](), set[Any]()
        for response in sorted(self.responses, key=_largest, reverse=True):
            stretches = response.stretches
            begins = [(*response.key[:2], stretches[: n + 1]) for n in range(len(stretches))]
            above = sum(begin in shown for begin in begins)  # lines of a tree share their begin
            if lines.count("") < SHOWN and above < len(stretches):
                shown.update(begins)
                title, *rows = response_lines(_response_json(response, decode))
                rows[:above] = [f"{'as above':>22}  for {stretches[above].begin} tokens"] * (above > 0)
                lines += ["", title, *rows]
        lines += ["", "* its 95% interval excludes 0"]
        if self.budgets:
            lines += ["", "forced after  in    mean reward [95%]"]
            return "\n".join([*lines, *("{:>12}{:>6}  {}".format(*budget.cells) for budget in self.budgets)])
        shares = ", ".join(f"{share:.0%}" for share in self.decided)
        lines += [f"the reward is decided, by quarters of a response: {shares}"]
        lines += ["", "  sign    rank  bias early, late noise  objectives"]
        return "\n".join([*lines, *(agreement.row for agreement in self.agreements)])


def look(
    probed: Sequence[Rollout], rollouts: Sequence[Rollout], lines: Mapping[LineKey, Sequence[int]], job: Job
) -> Found:
    """Return what the record of a probe says of some responses, ``lines``, of a step's ``rollouts``, which a
    run of ``job`` trained. ``lines``: lengths of each response before its places."""
    recorded = {rollout_key(rollout): rollout for rollout in rollouts}
    responses = [
        response
        for rollout in probed
        for response in _responses(
            rollout, recorded[rollout_key(rollout)], job.recipe.reward.on_error == "zero"
        )
        if (*rollout_key(rollout), response.part) in lines
    ]
    if any(rollout.with_role(FORCED) for rollout in probed):
        return Found(tuple(responses), (), tuple(_budgets(responses, lines)))
    changes = [
        Change(recorded[response.key[:2]], response.part, s.begin, s.end, s.change.mean, s.sure)
        for response in responses
        for s in response.stretches
    ]
    return Found(tuple(responses), tuple(audit(changes, rollouts, job.recipe)) if changes else ())


def _budgets(responses: Sequence[Probed], lines: Mapping[LineKey, Sequence[int]]) -> Iterator[Budget]:
    """Yield the mean reward for each number of tokens after which some response is forced, and without that.
    A response that is not forced counts with its own reward."""
    shared = sorted({length for response in responses for length in lines[response.key]})
    for length in [*shared, None]:
        forced = {response for response in responses if length in lines[response.key]}
        share = sum(response.weight for response in forced) / sum(response.weight for response in responses)
        of_prompts: dict[str, dict[int, tuple[float, np.ndarray]]] = defaultdict(dict)
        for response in responses:
            rewards = response.at.get(length) if response in forced else np.array([response.reward])
            if rewards is not None:  # responses that share a place share its continuations
                of = of_prompts[response.prompt_id]
                weight, _ = of.get(id(rewards), (0.0, rewards))
                of[id(rewards)] = weight + response.weight, rewards
        if not of_prompts:
            continue
        prompts = {prompt: _mean_reward([*of.values()]) for prompt, of in of_prompts.items()}
        means = [(1.0, np.array([interval.mean])) for interval in prompts.values()]
        over = _mean_reward(means) if len(means) > 1 else next(iter(prompts.values()))
        yield Budget(length, share, over, prompts)


def _mean_reward(sampled: Sequence[tuple[float, np.ndarray]]) -> Interval:
    """Return the mean over independent responses of some weights, each with the rewards of its
    continuations; a single response stands for itself."""
    if len(sampled) == 1:
        return change_of_mean(np.zeros(1), sampled[0][1])
    weights = np.array([weight for weight, _ in sampled])
    return change_of_mean(np.zeros(1), weights / weights.mean() * [rewards.mean() for _, rewards in sampled])


def _responses(probed: Rollout, recorded: Rollout, unscored_too: bool) -> Iterator[Probed]:
    """Yield all responses of a rollout; none if its prompt has fewer than two rewards. ``recorded``: the
    rollout whose parts were cut and continued; ``unscored_too``: what has no reward counts as its 0."""
    values: dict[int, list[float]] = defaultdict(list)
    continued = {part.number: part for part in probed.with_role(FORCED)}
    for part in probed.parts:
        if part.role == PROBE and (unscored_too or not (part.grade and part.grade.verdict == UNSCORED)):
            place = continued[part.parent].parent if part.parent in continued else part.parent
            values[place].append(response_reward(part, probed.prompt_id))
    known = {piece: np.array(rewards) for piece, rewards in values.items() if len(rewards) > 1}
    if -1 not in known:
        return
    pieces = [part for part in probed.parts if part.role.startswith(PIECE)]
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


def _unsigned(reward: Interval) -> str:
    return f"{reward.mean:.2f} [{reward.low:.2f}, {reward.high:.2f}]"


def response_lines(response: Mapping[str, Any]) -> list[str]:
    """Return a response of ``Found.as_json`` as text: a title, and a line for each stretch."""
    value, count = response["values"][0]
    name = f"{response['prompt_id']}/{response['index']}"
    title = f"{name}: reward {response['reward']:g}, value at the prompt {value:.2f} ({count} continuations)"
    rows = ((*stretch["change"], stretch["text"]) for stretch in response["stretches"])
    return [title] + [
        f"{f'{mean:+.2f} [{low:+.2f}, {high:+.2f}]':>22}{'*' if low > 0 or high < 0 else ' '} {text!r}"
        for mean, low, high, text in rows
    ]


def probes_of(step: Path) -> dict[RolloutKey, list[dict[str, Any]]]:
    """Return the responses of ``Found.as_json`` that probes of a recorded step found, by rollout. ``step``:
    its folder in a run, or in a probe."""
    found: dict[RolloutKey, list[dict[str, Any]]] = defaultdict(list)
    folders = step.parent, step.parent.parent
    for file in [folders[0] / FILE, *(file for f in folders for file in sorted(f.glob(f"probes/*/{FILE}")))]:
        with expecting("what eqlen probe writes now", file):
            probe = {**read_json(file)} if file.exists() else {}
            if FOUND in probe and step.name == step_name(probe["asked"]["step"] - 1):
                for response in probe[FOUND]["responses"]:
                    response_lines(response)  # has all that is shown
                    found[response["prompt_id"], response["index"]].append(response)
    return found


def _response_json(response: Probed, decode: Decode) -> dict[str, Any]:
    return {
        "prompt_id": response.prompt_id, "index": response.index, "part": response.part,
        "weight": response.weight, "reward": response.reward,
        "values": [[float(value.mean()), len(value)] for value in response.values],
        "stretches": [
            {"begin": s.begin, "end": s.end, "text": decode(s.token_ids),
             "change": [s.change.mean, s.change.low, s.change.high]}
            for s in response.stretches
        ],
    }  # fmt: skip
