"""Baselines of tokens (``loss.baseline``): what the reward of the lines through a token is compared with.

A line that goes on after t tokens has weight w(t) and leads to the reward G(t). ``alive`` compares token t of
a line with the others that are alive there,

    b(t) = (sum of w(t) G(t) over the others + 4 w0 B) / (sum of w(t) over the others + 4 w0)

B is the mean reward of the other lines of the prompt at their first token, and w0 the weight of one line
there: few lines, or none, are alive late in a response. ``fitted`` adds to it a linear function of t, b(t), B
and the mean reward of the siblings, with coefficients that are fitted to the other prompts of the batch.

A line's own rewards and tokens are in none of these, so they leave the expected step as it is
(docs/length_bias.md). The optimal token baseline (arXiv 2602.07078) weighs lines by their squared score norms
so far: with like norms it is ``alive``. As published it contains the own line, which scales late tokens down.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from megatron_eqlen.sampling.comparison import ComparisonUnit
from megatron_eqlen.types import Rollout

STRENGTH = 4.0
"""B counts as this many lines in ``alive``: the mean of few lines is noisier than B."""
RIDGE = 1.0
"""``alive`` counts as this many prompts in the fit of ``fitted``."""


@dataclass(frozen=True)
class Span:
    """Tokens ``start`` to ``end`` of a response, which one part of a rollout holds."""

    start: int
    end: int
    weight: float
    """Weight of the lines through it in their rollout."""
    reward: float
    """Their mean reward."""
    root: tuple[int, int]
    """Rollout and number of the first part of these lines."""
    unit: int
    """The same for spans that continue the same tokens."""


Baselines = list[list[np.ndarray | None]]
"""[tokens] float64 for each span of each prompt. None: the span keeps the advantage of its unit."""
TokenBaseline = Callable[[Sequence[Sequence[Span]], int], Baselines]
"""(spans of each prompt of a batch, most tokens of a response) -> their baselines."""


def of_unit(prompts: Sequence[Sequence[Span]], limit: int) -> Baselines:
    return [[None] * len(spans) for spans in prompts]


def prompt_mean(prompts: Sequence[Sequence[Span]], limit: int) -> Baselines:
    """B alone, which ``alive`` and ``fitted`` are measured against."""
    return [[known and np.full_like(known.alive, known.prompt) for known in _others(s)] for s in prompts]


def alive(prompts: Sequence[Sequence[Span]], limit: int) -> Baselines:
    return [[known and known.alive for known in _others(spans)] for spans in prompts]


def fitted(prompts: Sequence[Sequence[Span]], limit: int) -> Baselines:
    others = [_others(spans) for spans in prompts]
    sums = [sum((known.sums(limit) for known in of_prompt if known), NO_SUMS) for of_prompt in others]
    # each prompt is fitted by the sums of all others
    total = np.sum(sums, axis=0)
    fits = [_solved(total - own, max(len(prompts) - 1, 1)) for own in sums]
    return [
        [known and known.alive + known.features(limit) @ fit for known in of_prompt]
        for of_prompt, fit in zip(others, fits, strict=True)
    ]


BASELINES: dict[str, TokenBaseline] = {"unit": of_unit, "alive": alive, "fitted": fitted}


@dataclass(frozen=True)
class _Others:
    """Rewards of other lines than those through ``span``."""

    span: Span
    alive: np.ndarray
    """[tokens] b(t)"""
    prompt: float
    """B"""
    siblings: float

    def features(self, limit: int) -> np.ndarray:
        """Return [tokens, 6]. Lengths are in units of ``limit``, which no line decides."""
        time = np.arange(self.span.start, self.span.end) / limit
        one, level = np.ones_like(time), self.alive - 0.5
        others = self.prompt - self.alive, self.siblings - self.alive
        return np.stack([one, time, level, time * level, *others], axis=1)

    def sums(self, limit: int) -> np.ndarray:
        """Return [6, 7], the share of these tokens in the normal equations of what ``alive`` leaves."""
        features, rest = self.features(limit), self.span.reward - self.alive
        return self.span.weight**2 * features.T @ np.column_stack([features, rest])


NO_SUMS = np.zeros((6, 7))


def _solved(sums: np.ndarray, prompts: int) -> np.ndarray:
    """Return the coefficients [6] of normal equations that ``prompts`` prompts contribute to."""
    squares = np.diag(sums)  # the first is that of the feature 1
    # features that hardly vary get a thousandth of the first one's, or the system could be singular
    ridge = np.maximum(squares, 1e-3 * squares[0]) * RIDGE / prompts if squares[0] else np.ones(len(sums))
    return np.linalg.solve(sums[:, :-1] + np.diag(ridge), sums[:, -1])


def _others(spans: Sequence[Span]) -> list[_Others | None]:
    """Return the rewards that each span may be compared with; None without another line."""
    # [tokens] sums over all lines that are alive
    sums = np.zeros((2, max(span.end for span in spans) + 1))
    for span in spans:
        # a difference array: a span adds at its start and takes off behind its end
        amount = np.array([span.weight, span.weight * span.reward])
        sums[:, span.start] += amount
        sums[:, span.end] -= amount
    weights, values = sums.cumsum(1)

    def of(own: Span) -> _Others | None:
        roots = [span for span in spans if span.start == 0 and span.root != own.root]
        if not roots:
            return None
        prompt = float(np.average([s.reward for s in roots], weights=[s.weight for s in roots]))
        siblings = [span.reward for span in spans if span.unit == own.unit and span is not own]
        strength = STRENGTH * fmean(span.weight for span in roots)
        weight = np.maximum(weights[own.start : own.end] - own.weight, 0.0)  # round-off
        value = values[own.start : own.end] - own.weight * own.reward
        alive = (value + strength * prompt) / (weight + strength)
        return _Others(own, alive, prompt, fmean(siblings) if siblings else prompt)

    return [of(span) for span in spans]


# ---- baselines of comparison units -----------------------------------------------------------------------


def token_baselines(
    units: Sequence[ComparisonUnit], rollouts: Sequence[Rollout], baseline: TokenBaseline, limit: int
) -> list[list[np.ndarray | None]]:
    """Return the baseline of each token of each member of ``units``. ``ComparisonUnit.rollout`` counts in
    ``rollouts``. Raises ValueError for a baseline that does not fit."""
    spans: dict[str, list[Span]] = defaultdict(list)
    ends = [rollout.ends() for rollout in rollouts]
    # number of the first part of each part's line
    roots = [r.along(-1, lambda root, part: part.number if root < 0 else root) for r in rollouts]
    for number, unit in enumerate(units):
        weight = (1.0 if unit.share is None else unit.share) / len(unit.members)
        for part, reward in zip(unit.members, unit.rewards, strict=True):
            start = ends[unit.rollout][part.parent]
            root = unit.rollout, roots[unit.rollout][part.number]
            span = Span(start, start + len(part), weight, reward, root, number)
            spans[unit.prompt_id].append(span)
    baselines = checked_baselines(baseline, list(spans.values()), limit)
    left = {prompt_id: iter(of_prompt) for prompt_id, of_prompt in zip(spans, baselines, strict=True)}
    return [[next(left[unit.prompt_id]) for _ in unit.members] for unit in units]


def checked_baselines(baseline: TokenBaseline, prompts: Sequence[Sequence[Span]], limit: int) -> Baselines:
    """Return arrays, or None. Raises ValueError unless a span has a finite number a token, or None."""
    baselines: Baselines = [
        [None if values is None else np.asarray(values, np.float64) for values in of_prompt]
        for of_prompt in baseline(prompts, limit)
    ]
    where = f"baseline {getattr(baseline, '__name__', type(baseline).__name__)}"
    if [len(of_prompt) for of_prompt in baselines] != [len(spans) for spans in prompts]:
        raise ValueError(f"{where}: expected a baseline for each span of each of {len(prompts)} prompts")
    for spans, of_prompt in zip(prompts, baselines, strict=True):
        for span, values in zip(spans, of_prompt, strict=True):
            shape = (span.end - span.start,)
            if values is not None and not (values.shape == shape and np.isfinite(values).all()):
                raise ValueError(f"{where}: expected {shape[0]} finite numbers or None, found {values}")
    return baselines
