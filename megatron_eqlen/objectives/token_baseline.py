"""``loss.baseline: alive``: each token is compared with the other lines that are alive where it is.

A line that goes on after t tokens has weight w(t) and leads to the reward G(t); for token t of another line

    b(t) = (sum of w(t) G(t) over the others + w0 B) / (sum of w(t) over the others + w0)

B is the mean reward of the other lines of the prompt at their first token, and w0 the weight of one line
there: few lines, or none, are alive late in a response. A line's own rewards and tokens are in none of these,
so b(t) leaves the expected step as it is (docs/length_bias.md).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_eqlen.sampling.comparison import ComparisonUnit
from megatron_eqlen.types import Rollout


@dataclass(frozen=True)
class _Span:
    """Tokens ``start`` to ``end`` of a line, which one part holds."""

    start: int
    end: int
    weight: float
    reward: float
    root: tuple[int, int]
    """Rollout and number of the first part of the line."""


def alive_baselines(
    units: Sequence[ComparisonUnit], rollouts: Sequence[Rollout]
) -> list[list[np.ndarray | None]]:
    """Return the baseline of each token of each member of ``units``: [tokens] float64, or None where no other
    line of the prompt has a reward. ``ComparisonUnit.rollout`` counts in ``rollouts``."""
    spans: dict[str, list[list[_Span]]] = defaultdict(list)
    ends = [rollout.ends() for rollout in rollouts]
    roots = [_roots(rollout) for rollout in rollouts]
    for unit in units:
        weight = (1.0 if unit.share is None else unit.share) / len(unit.members)
        of_unit: list[_Span] = []
        for part, reward in zip(unit.members, unit.rewards, strict=True):
            start = ends[unit.rollout][part.parent]
            root = unit.rollout, roots[unit.rollout][part.number]
            of_unit.append(_Span(start, start + len(part), weight, reward, root))
        spans[unit.prompt_id].append(of_unit)
    baselines = {prompt_id: iter(_of_prompt(of_units)) for prompt_id, of_units in spans.items()}
    return [next(baselines[unit.prompt_id]) for unit in units]


def _roots(rollout: Rollout) -> dict[int, int]:
    """Return the number of the first part of each part's line, by the part's number."""
    roots: dict[int, int] = {}
    for part in rollout.parts:
        roots[part.number] = roots.get(part.parent, part.number)
    return roots


def _of_prompt(units: list[list[_Span]]) -> list[list[np.ndarray | None]]:
    spans = [span for unit in units for span in unit]
    # [tokens] sums over all lines that are alive
    alive = np.zeros((2, max(span.end for span in spans) + 1))
    for span in spans:
        amount = np.array([span.weight, span.weight * span.reward])
        alive[:, span.start] += amount
        alive[:, span.end] -= amount
    weights, values = alive.cumsum(1)
    roots = [span for span in spans if span.start == 0]

    def baseline(own: _Span) -> np.ndarray | None:
        others = [(span.weight, span.reward) for span in roots if span.root != own.root]
        if not others:
            return None
        prior = np.average([reward for _, reward in others], weights=[weight for weight, _ in others])
        strength = float(np.mean([weight for weight, _ in others]))
        weight = np.maximum(weights[own.start : own.end] - own.weight, 0.0)  # round-off
        value = values[own.start : own.end] - own.weight * own.reward
        return (value + strength * prior) / (weight + strength)

    return [[baseline(span) for span in unit] for unit in units]
