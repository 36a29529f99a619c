"""Means with intervals for repeated accuracies, and the difference of two. Scores are ``[R, P]`` arrays: R
replicates (training seeds, or one run's samples) of the same P problems. Intervals over replicates alone
generalise to another run on the same problems; over replicates and problems crossed, to other problems of the
same kind, which is what readers expect of a benchmark of 30 problems."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

import numpy as np

LEVEL = 0.95
POWER = 0.8
DRAWS = 10_000


@dataclass(frozen=True)
class Interval:
    """``mean`` with a 95% interval; ``method`` names how it was computed."""

    mean: float
    low: float
    high: float
    method: str

    def __str__(self) -> str:
        return f"{100 * self.mean:.1f}% [{100 * self.low:.1f}, {100 * self.high:.1f}]"

    @property
    def points(self) -> str:
        """A difference in percentage points, with its sign."""
        return f"{100 * self.mean:+.1f} points [{100 * self.low:+.1f}, {100 * self.high:+.1f}]"


def crossed_bootstrap(scores: np.ndarray, seed: int = 0) -> Interval:
    """Headline interval: percentile bootstrap that resamples replicates and problems independently."""
    means = _crossed_means(scores, *_draw_weights(_checked(scores).shape, seed))
    return _interval(float(scores.mean()), means, "crossed bootstrap over replicates and problems")


def replicate_bootstrap(scores: np.ndarray, seed: int = 0) -> Interval:
    """Interval of the paper: percentile bootstrap over replicates, with the problems held fixed."""
    per_replicate = _checked(scores).mean(axis=1)
    # [DRAWS, R]: each draw is R replicates with replacement.
    draws = np.random.default_rng(seed).choice(per_replicate, size=(DRAWS, len(per_replicate)))
    return _interval(float(scores.mean()), draws.mean(axis=1), "paper: bootstrap over replicates")


def paired_difference(before: np.ndarray, after: np.ndarray, seed: int = 0) -> Interval:
    """Return ``after`` [R2, P] minus ``before`` [R1, P]. A bootstrap draw takes the same problems on both
    sides, and replicates of each on its own. Raises ValueError for unequal numbers of problems."""
    before, after = _checked(before), _checked(after)
    if before.shape[1] != after.shape[1]:
        raise ValueError(f"paired difference: {before.shape[1]} problems before, {after.shape[1]} after")
    # The problems' weights are drawn once, for both sides; replicates of the two sides apart.
    problems, ours, theirs = _draw_weights((before.shape[1], after.shape[0], before.shape[0]), seed)
    draws = _crossed_means(after, ours, problems) - _crossed_means(before, theirs, problems)
    return _interval(float(after.mean() - before.mean()), draws, "problem-paired crossed bootstrap")


def seed_difference(before: np.ndarray, after: np.ndarray) -> Interval:
    """Return ``after`` minus ``before``, [R] means by seed: paired t, problems fixed. NaN for one seed."""
    differences, method = after - before, "t over seeds"
    mean, count = float(differences.mean()), len(differences)
    if count == 1:
        return Interval(mean, float("nan"), float("nan"), method)
    # t_{0.975, R - 1} s / sqrt(R)
    half = _quantile(count, (1 + LEVEL) / 2) * differences.std(ddof=1) / np.sqrt(count)
    return Interval(mean, mean - half, mean + half, method)


def change_of_mean(before: np.ndarray, after: np.ndarray) -> Interval:
    """Return the mean of ``after`` minus that of ``before``, [n] and [m] independent rewards; a single one
    counts as known (two: no interval, NaN). Rewards of 0 and 1: a success and a failure are added to each
    side (Agresti and Caffo 2000): few are no certainty. Others: Student's t of the smaller side."""
    binary = bool(np.isin(np.concatenate([before, after]), (0.0, 1.0)).all())
    centre, variance, least = 0.0, 0.0, np.inf
    # The centre is the difference of the two means, its variance the sum of theirs.
    for values, sign in ((before, -1), (after, 1)):
        count = len(values)
        # A single reward has no variance to estimate.
        if count == 1:
            centre += sign * float(values[0])
            continue
        mean, spread = float(values.mean()), float(values.var(ddof=1))
        # A success and a failure more: p = (successes + 1) / (n + 2), variance p (1 - p) / (n + 2).
        if binary:
            count += 2
            mean = (float(values.sum()) + 1) / count
            spread = mean * (1 - mean)
        centre, variance, least = centre + sign * mean, variance + spread / count, min(least, count)
    share = (1 + LEVEL) / 2
    quantile = NormalDist().inv_cdf(share) if binary else _quantile(least, share)
    # Single rewards on both sides, of which no variance is known: no interval.
    half = quantile * float(np.sqrt(variance)) if least < np.inf else float("nan")
    method = "Agresti-Caffo" if binary else "t"
    # The shown difference is the plain one; only the interval is around the shifted centre.
    return Interval(float(after.mean() - before.mean()), centre - half, centre + half, method)


def detectable_difference(before: np.ndarray, after: np.ndarray) -> float:
    """Return the smallest difference that so many paired seeds would have shown in 80% of all experiments:
    that the interval of ``seed_difference`` excludes 0. (t_{0.975, R - 1} + t_{0.8, R - 1}) s / sqrt(R) for R
    differences of standard deviation s (Bloom 1995, "Minimum detectable effects"). NaN for one seed."""
    differences = after - before
    count = len(differences)
    if count == 1:
        return float("nan")
    quantiles = _quantile(count, (1 + LEVEL) / 2) + _quantile(count, POWER)
    return float(quantiles * differences.std(ddof=1) / np.sqrt(count))


def pass_at_k(scores: np.ndarray, k: int) -> float:
    """Return the chance that one of k samples or more is right (score above 0), unbiased from R >= k
    replicates: 1 - C(R - c, k) / C(R, k) for a problem with c right samples (Chen et al. 2021)."""
    replicates = _checked(scores).shape[0]
    if not 1 <= k <= replicates:
        raise ValueError(f"pass@k: expected 1 <= k <= {replicates} samples, found {k}")
    # [P] wrong samples of each problem.
    wrong = (scores <= 0).sum(axis=0)
    steps = np.arange(k)
    # [P, k] factors of C(wrong, k) / C(R, k): k draws without replacement that are all wrong.
    all_wrong = np.clip(wrong[:, None] - steps, 0, None) / (replicates - steps)
    return float(1.0 - all_wrong.prod(axis=1).mean())


def _quantile(count: float, share: float) -> float:
    from scipy.special import stdtrit  # slow to import

    return float(stdtrit(count - 1, share))


def _checked(scores: np.ndarray) -> np.ndarray:
    if scores.ndim != 2 or scores.size == 0:
        raise ValueError(f"scores: expected replicates x problems, found shape {scores.shape}")
    return scores


def _crossed_means(scores: np.ndarray, replicates: np.ndarray, problems: np.ndarray) -> np.ndarray:
    """Return [DRAWS] means over resampled replicates and problems, given their weights."""
    # [DRAWS, R] @ [R, P], then weighted by problem, [DRAWS, P].
    return ((replicates @ scores) * problems).sum(axis=1)


def _draw_weights(counts: tuple[int, ...], seed: int) -> list[np.ndarray]:
    """Return for each count [DRAWS, count] float64: how often each item is drawn, divided by ``count``."""
    return [drawn / drawn.shape[1] for drawn in _draws(counts, seed)]


@lru_cache(maxsize=16)
def _draws(counts: tuple[int, ...], seed: int) -> list[np.ndarray]:
    """Return [DRAWS, count] int16: how often each item is drawn; cached for a run's evaluations."""
    rng = np.random.default_rng(seed)
    draws = (rng.multinomial(count, np.full(count, 1 / count), size=DRAWS) for count in counts)
    # Counts of few draws: as int16 the cache needs a quarter of the memory.
    return [drawn.astype(np.int16) for drawn in draws]


def _interval(mean: float, draws: np.ndarray, method: str) -> Interval:
    low, high = np.quantile(draws, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Interval(mean, float(low), float(high), method)
