"""Effective samples of streams and of independent responses, from laws of length alone.

The paper counts two samples for a pair (table 2: about 6 pairs a stream, 6.04 times GRPO's samples in equal
GPU time). Streams are drawn as the harvester makes them: two tracks, and one more from the end of each pair
until the response limit. Each response that ends is right with the same probability, whatever its length; a
truncated one is wrong.

python -m tools.research.samples
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple, dataclass

import numpy as np
from scipy import stats
from scipy.stats.distributions import rv_frozen

from megatron_eqlen.report.format import markdown_rows

TRACKS = 16
"""Tracks of a prompt: responses of GRPO, or twice its streams."""
MEAN, LIMIT = 10_000, 32_768
"""The paper's lengths: about 10,000 tokens, and its limit."""


def lognormal(cv: float) -> rv_frozen:
    """Return the law of lengths with this coefficient of variation, in units of its mean."""
    sigma = np.sqrt(np.log(1 + cv * cv))
    return stats.lognorm(sigma, scale=np.exp(-sigma * sigma / 2))


GRID = 4097
"""Points between which the laws are interpolated."""
LAWS = {
    "exponential": stats.expon(),
    **{f"lognormal, CV {cv}": lognormal(cv) for cv in (0.3, 0.6, 1.2)},
    "heavy tail": stats.lomax(2.2, scale=1.2),
}
"""Laws of length, in units of the mean."""


@dataclass(frozen=True)
class Ratios:
    """EqLen's samples relative to GRPO's."""

    pairs: float
    """Pairs a stream."""
    lockstep: float
    """All pairs count, and slots of finished tracks idle until the prompt's longest track ends."""
    token: float
    """All pairs count, for each generated token."""
    trained: float
    """Pairs with unequal rewards (maximum over the extensions of B) and groups with unequal rewards count,
    for each generated token."""


def ratios(law: str, accuracy: float = 0.5, prompts: int = 400) -> Ratios:
    """Return the ratios, means over ``prompts`` simulated prompts of ``TRACKS`` tracks."""
    random = np.random.default_rng(0)
    grid = np.linspace(0, LIMIT / MEAN, GRID)
    hazard = -LAWS[law].logsf(grid)  # cumulative

    def length(start: float) -> float:
        """Return the length of a response that is longer than ``start``; infinite beyond the limit."""
        end = np.interp(start / MEAN, grid, hazard) + random.exponential()
        return MEAN * float(np.interp(end, hazard, grid, right=np.inf))

    def right() -> bool:
        return bool(random.random() < accuracy)

    groups = np.sum([_group(length, right) for _ in range(prompts)], axis=0)
    streams = np.sum([_streams(length, right) for _ in range(prompts)], axis=0)
    made, trained, tokens, longest = streams / groups
    return Ratios(made, made / longest, made / tokens, trained / tokens)


def _group(length: Callable[[float], float], right: Callable[[], bool]) -> tuple[float, ...]:
    """Return a group's samples, trained samples, tokens and longest response."""
    lengths = [length(0) for _ in range(TRACKS)]
    rewards = {each <= LIMIT and right() for each in lengths}
    made = [min(each, LIMIT) for each in lengths]
    return TRACKS, TRACKS if len(rewards) > 1 else 0, sum(made), max(made)


def _streams(length: Callable[[float], float], right: Callable[[], bool]) -> tuple[float, ...]:
    """Return the same of a prompt's streams."""
    samples, trained, tokens = 0, 0, 0.0
    for _ in range(TRACKS // 2):
        tracks, rewards = [length(0), length(0)], []
        tokens += sum(min(track, LIMIT) for track in tracks)
        while (short := min(tracks)) <= LIMIT:
            rewards.append(right())
            fork = length(short)
            tokens += min(fork, LIMIT) - short
            tracks = [max(tracks), fork]
        samples += 2 * len(rewards)
        trained += 2 * sum(reward != any(rewards[n + 1 :]) for n, reward in enumerate(rewards))
    return samples, trained, tokens, LIMIT  # two tracks never end at exactly one length


COLUMNS = ("pairs a stream", "lockstep time, all pairs", "per token, all pairs", "per token, trained pairs")

if __name__ == "__main__":
    rows = [(law, *(f"{ratio:.2f}" for ratio in astuple(ratios(law)))) for law in LAWS]
    print(markdown_rows([dict(zip(("lengths", *COLUMNS), row, strict=True)) for row in rows]))
