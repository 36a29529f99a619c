"""Results of a probe: values of prefixes, changes along responses, and advantages that agree with them.

    record of a probe ─► values (mean reward of the continuations of a place) ─► changes along responses
                                                                                     │
    the step's rollouts ─► advantages of every objective on the same tokens ─────────┴─► audit

A change between two places is a difference of two independent means, since nothing recorded behind a place is
among its continuations. The last change of a response is its own reward less its last value.
"""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from megatron_eqlen.evaluation.statistics import Interval, change_of_mean
from megatron_eqlen.files import expecting, read_json, step_name
from megatron_eqlen.job import Job
from megatron_eqlen.report.audit import Change, audit
from megatron_eqlen.report.rollouts import Decode
from megatron_eqlen.sampling.comparison import response_reward
from megatron_eqlen.sampling.probe import ProbeSampling
from megatron_eqlen.types import Line, Rollout, RolloutKey, tokens_along

QUARTERS = (0.0, 0.25, 0.5, 0.75, 1.0)
FILE, FOUND = "probe.json", "found"
SHOWN = 5
"""Responses that are printed."""


@dataclass(frozen=True, eq=False)
class Probed:
    """A recorded response, with the rewards of its continuations."""

    rollout: Rollout
    line: Line
    at: Mapping[int, np.ndarray]
    """Rewards of the continuations of each place, by its distance from the prompt in tokens, ascending: at
    least two at the prompt; at the end the response's own."""

    @cached_property
    def values(self) -> dict[int, np.ndarray]:
        """``at`` without places that have fewer than two rewards."""
        end = self.line.length
        return {length: rewards for length, rewards in self.at.items() if length == end or len(rewards) > 1}

    @cached_property
    def changes(self) -> list[Change]:
        """Changes of the value between two places, and from the last place to the end."""
        parts = self.rollout.line(self.line.last.number)
        return [
            Change(parts, begin, end, astuple(change_of_mean(before, after))[:3])
            for (begin, before), (end, after) in itertools.pairwise(self.values.items())
        ]

    def undecided(self, share: float) -> float:
        """Return the reward's unbiased variance after this share, linear between places; 0 at the end."""
        variances = [rewards.var(ddof=1) if len(rewards) > 1 else 0.0 for rewards in self.values.values()]
        return float(np.interp(share * self.line.length, [*self.values], variances))

    def row(self, decode: Decode) -> dict[str, Any]:
        """Return what is shown of it; a stretch has the tokens that a change is of."""
        parts = self.changes[0].line
        ids = tokens_along(parts).tolist()
        # a place is behind what an environment answered
        bounds = [*np.flatnonzero([own for part in parts for own in part.tokens.is_generated]), len(ids)]
        return {
            "prompt_id": self.rollout.prompt_id, "index": self.rollout.index, "part": self.line.last.number,
            "weight": self.line.weight, "reward": float(self.at[self.line.length][0]),
            "values": [[float(self.values[s.begin].mean()), len(self.values[s.begin])] for s in self.changes],
            "stretches": [
                {"begin": begin, "end": end, "text": decode(tuple(ids[bounds[begin] : bounds[end]])),
                 "change": [*value]}
                for _, begin, end, value in self.changes
            ],
        }  # fmt: skip


def look(probed: Sequence[Rollout], probe: ProbeSampling, job: Job, decode: Decode) -> dict[str, Any]:
    """Return what the record of a ``probe`` says of the responses that a run of ``job`` trained: a row
    each, and the accuracy by length where an end marker was forced; else the share of the reward's variance
    that each quarter decides (NaN without any), and what estimators say."""
    rewards = {new.key: probe.rewards(new, job.recipe.reward.on_error == "zero") for new in probed}
    responses = list[Probed]()
    for rollout, line in probe.responses:
        parts = {-1, *(part.number for part in rollout.line(line.last.number))}
        of_rollout, own = rewards[rollout.key], response_reward(line.last, rollout.prompt_id)
        # places on this response's line: those of other lines of the tree are not prefixes of it
        at = {length: found for (part, length), found in of_rollout.items() if part in parts}
        # without a value at the prompt no change can be computed
        if len(at[0]) > 1:
            responses.append(Probed(rollout, line, at | {line.length: np.array([own])}))
    found: dict[str, Any] = {"responses": [response.row(decode) for response in responses]}
    if responses and probe.forced:
        return found | {"budgets": [*_budgets(responses)]}
    weights = np.array([response.line.weight for response in responses])
    # [5] mean variance that is left at each quarter's bounds
    left = [float(weights @ [response.undecided(share) for response in responses]) for share in QUARTERS]
    decided = [(a - b) / left[0] for a, b in itertools.pairwise(left) if left[0] > 0]
    changes = [change for response in responses for change in response.changes]
    estimators = audit(changes, probe.rollouts, job) if changes else []
    return found | {"decided_by_quarter": decided, "objectives": estimators}


def _budgets(responses: Sequence[Probed]) -> Iterator[dict[str, Any]]:
    """Yield the mean reward for each number of tokens at which some response is forced, and unforced (None):
    over prompts, or a single prompt's responses. An unforced response counts with its own reward."""
    weight = sum(response.line.weight for response in responses)
    lengths = {length for response in responses for length in response.at if length < response.line.length}
    for length in [*sorted(lengths), None]:
        forced, of_prompts = 0.0, defaultdict[str, dict[int, tuple[float, np.ndarray]]](dict)
        for response in responses:
            own = response.at[response.line.length]
            rewards = response.at.get(length, own)
            forced += response.line.weight * (rewards is not own)
            if rewards is own or len(rewards) > 1:
                # responses that share a place share its continuations
                of = of_prompts[response.rollout.prompt_id]
                shared, _ = of.get(id(rewards), (0.0, rewards))
                of[id(rewards)] = shared + response.line.weight, rewards
        if of_prompts:
            prompts = {prompt: _mean_reward([*of.values()]) for prompt, of in of_prompts.items()}
            over, *others = prompts.values()
            if others:
                over = change_of_mean(np.zeros(1), np.array([reward.mean for reward in prompts.values()]))
            yield {"length": length, "forced": forced / weight, "reward": over, "prompts": prompts}


def _mean_reward(sampled: Sequence[tuple[float, np.ndarray]]) -> Interval:
    """Return the weighted mean over independent responses' continuations; of a single one over its own."""
    weights, rewards = zip(*sampled, strict=True)
    if len(sampled) == 1:
        return change_of_mean(np.zeros(1), rewards[0])
    factors, means = np.array(weights) / np.mean(weights), np.array([values.mean() for values in rewards])
    mean = (factors * means).mean()
    # unequal weights alone are no spread
    spread = means if (means == means[0]).all() else mean + factors * (means - mean)
    return change_of_mean(np.zeros(1), spread)


def as_json(found: dict[str, Any]) -> dict[str, Any]:
    """Return what ``look`` found as plain data; JSON has no NaN."""
    return json.loads(json.dumps(found, default=asdict), parse_constant=lambda _: None)


def tables(found: dict[str, Any]) -> str:
    """Return what ``look`` found as text: the responses that changed most, quarters, and estimators."""
    lines, shown = list[str](), set[Any]()
    by_change = sorted(found["responses"], key=lambda r: -max(abs(s["change"][0]) for s in r["stretches"]))
    for response in by_change:
        key, stretches = (response["prompt_id"], response["index"]), response["stretches"]
        begins = [(*key, str(stretches[: n + 1])) for n in range(len(stretches))]
        above = sum(begin in shown for begin in begins)  # lines of a tree share their begin
        if lines.count("") < SHOWN and above < len(stretches):
            shown.update(begins)
            title, *rows = response_lines(response)
            rows[:above] = [f"{'as above':>22}  for {stretches[above]['begin']} tokens"] * (above > 0)
            lines += ["", title, *rows]
    lines += ["", "* its 95% interval excludes 0"]
    if "budgets" in found:
        lines += ["", "forced after  in    mean reward [95%]"]
        for budget in found["budgets"]:
            length, reward = budget["length"], budget["reward"]
            after = "never" if length is None else f"{length:,}"
            mean = f"{reward.mean:.2f} [{reward.low:.2f}, {reward.high:.2f}]"
            lines.append(f"{after:>12}{budget['forced']:>6.0%}  {mean}")
        return "\n".join(lines)
    shares = ", ".join(f"{share:.0%}" for share in found["decided_by_quarter"])
    lines += [f"the reward is decided, by quarters of a response: {shares or 'no reward varies'}"]
    lines += ["", "  sign    rank  bias early, late noise  objectives"]
    return "\n".join([*lines, *(agreement.row for agreement in found["objectives"])])


def response_lines(response: Mapping[str, Any]) -> list[str]:
    """Return a row of a response as text: a title, and a line for each stretch."""
    value, count = response["values"][0]
    name = f"{response['prompt_id']}/{response['index']}"
    title = f"{name}: reward {response['reward']:g}, value at the prompt {value:.2f} ({count} continuations)"
    rows = ((*stretch["change"], stretch["text"]) for stretch in response["stretches"])
    return [title] + [
        f"{f'{mean:+.2f} [{low:+.2f}, {high:+.2f}]':>22}{'*' if low > 0 or high < 0 else ' '} {text!r}"
        for mean, low, high, text in rows
    ]


def probes_of(step: Path) -> dict[RolloutKey, list[dict[str, Any]]]:
    """Return, by rollout, what probes of a recorded step (its folder in a run or a probe) found."""
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
