"""Outcome profile: how much of the reward's variance is decided in each part of a response.

Lines that fork at a prefix h are independent continuations of it: their rewards estimate Var(R | h), what h
leaves undecided, without bias. The first forks of all lines end part 1 of a response, the second part 2, ...

    v_k    share of Var(R | prompt) that part k decides      x_k    share of a response's tokens at its end
    x, u   x_k at one fork, and the variance left there      m      lines that continue after this fork
    n      share of variance x tokens behind the fork: (1 - x) u where all lines go on, more where few do
    T      tokens of a response

Without forks the noise is the sum of x_k v_k if a perfect baseline is subtracted, and x + the larger of 1 - x
and n if the mean is. The fork divides by m what is decided behind it, and costs x + (1 - x) m times the
tokens. The deciding token, 1/T of a response, is no noise: its score goes with its reward, and lines that
share its prefix do not average it. The noise with the fork is

    perfect baselines    sum of x_k v_k before + sum of x_k v_k behind / m + u / T
    means                x (1 - u) + x u / m + n / (m - 1) + u / T

A fork pays where noise x tokens falls with either baseline, so that no gain of a baseline counts as the
fork's. Scores of tokens are taken to be orthogonal and equally large.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np

from megatron_eqlen.recipe import Recipe
from megatron_eqlen.sampling.comparison import response_reward
from megatron_eqlen.types import Metrics, Part, Rollout

RANKS = 8
"""Most forks of a line that are looked at."""
LINES = np.arange(2, 33)
"""Numbers of lines that a fork may have."""
APART = 0.05
"""Least share of the tokens between two places of forks."""
DRAWS, LEAST = 400, 10
"""Resamples for intervals of 95%: of the prompts, or of the rollouts of fewer than ``LEAST`` prompts."""


class Fork(NamedTuple):
    """A part of a rollout, or its prompt, that several lines continue."""

    length: int
    """Tokens of the response before the fork."""
    after: float
    """Mean number of tokens after it."""
    weight: float
    """Weight of the line that forks."""
    variance: float
    """Unbiased estimate of the variance of the reward, given the tokens before; it may be negative."""
    behind: int
    """Forks behind it, that of the prompt included."""


class _Outcomes(NamedTuple):
    """Means over what continues a part, itself included."""

    reward: float
    square: float
    tokens: float


def forks(rollout: Rollout) -> Iterator[Fork]:
    """Yield the forks of a complete scored rollout, longest lines first, without parts that were cut off."""
    ends, weights, depth = rollout.ends(), rollout.weights(), rollout.along(0, lambda n, _: n + 1)
    branches_of: dict[int, list[_Outcomes]] = defaultdict(list)
    parts = {part.number: part for part in reversed(rollout.parts)}
    # a stream keeps one of two truncated tracks, so a single branch there stands for two equal ones
    halved = {part.parent for part in rollout.with_role("tail") if rollout.outcome == "truncated"}
    for number in (*parts, -1):  # from the leaves down to the prompt
        part, branches = parts.get(number), branches_of[number]
        if len(branches) > 1 or (branches and number in halved):
            after = fmean(branch.tokens for branch in branches)
            yield Fork(ends[number], after, weights[number], _variance(branches), depth[number])
        if part is not None and (outcomes := _outcomes(rollout, part, branches)) is not None:
            # a part that the budget cut off tells nothing to the parts above
            branches_of[part.parent].append(outcomes)


def _outcomes(rollout: Rollout, part: Part, branches: list[_Outcomes]) -> _Outcomes | None:
    if branches:
        reward, square, tokens = map(fmean, zip(*branches, strict=True))
        return _Outcomes(reward, square, tokens + len(part))
    if part.finish_reason is None:
        return None
    reward = response_reward(part, rollout.prompt_id)
    return _Outcomes(reward, reward**2, len(part))


def _variance(branches: list[_Outcomes]) -> float:
    """Return the mean of (R - R')^2 / 2 over rewards of different branches."""
    if len(branches) == 1:
        return 0.0
    count, rewards = len(branches), [branch.reward for branch in branches]
    products = (sum(rewards) ** 2 - sum(reward**2 for reward in rewards)) / (count * (count - 1))
    return fmean(branch.square for branch in branches) - products


def without_profile(rollouts: Iterable[Rollout], recipe: Recipe) -> str:
    """Return why forks of these rollouts are a selection, which says nothing of the lines that do not fork;
    empty where every line forks that reaches a place of forks."""
    tree = recipe.tree_sampling
    if recipe.sampling == "tree" and tree.fork == "profile":
        return "tree_sampling.fork: profile tries several places, each with a profile of its own"
    if recipe.sampling == "tree" and tree.fork == "death" and (recipe.group_size, tree.branching) != (2, 2):
        return "at a death one of several lines forks, and what the others leave undecided is not seen"
    cut = sum(rollout.outcome == "budget" for rollout in rollouts)
    return f"the budget cut {cut} rollouts, which are the long ones" if cut else ""


def by_rank(rollout: Rollout) -> np.ndarray:
    """Return [RANKS + 1, 3] float64: the variance that forks of each rank leave undecided, the tokens after
    them, and their product, each fork with the weight of its line. Rank 0 is the prompt."""
    sums = np.zeros((RANKS + 1, 3))
    for fork in forks(rollout):
        if fork.behind <= RANKS:
            values = fork.variance, fork.after, fork.variance * fork.after
            sums[fork.behind] += fork.weight * np.array(values)
    return sums


def profile_metrics(rollouts: Sequence[Rollout], recipe: Recipe) -> Metrics:
    """Return the ``profile/...`` metrics of complete scored rollouts; none without a profile of forks."""
    from megatron_eqlen.processes.distributed import at_homes  # imports torch

    # rank 0: variance, tokens; rank 1: what is undecided, tokens after, noise after
    of_ranks = at_homes(rollouts, lambda rollout: by_rank(rollout)[:2].ravel().tolist())
    sums: list[list[float]] = [sums for sums in of_ranks if sums[1]]
    if not sums or not np.sum(sums, axis=0)[4] or without_profile(rollouts, recipe):
        return {}
    means: list[float] = np.mean(sums, axis=0)[[0, 1, 3, 4, 5]].tolist()
    after = "profile/undecided", "profile/tokens_after", "profile/noise_after"
    names = "profile/variance", "profile/tokens", *after
    return {"profile/rollouts": float(len(sums)), **dict(zip(names, means, strict=True))}


def gain_metrics(metrics: Metrics) -> Metrics:
    """Return ``profile/fork_gain`` of a step, 1 where no fork pays; nothing where no reward varies."""
    if metrics.get("profile/variance", 0.0) <= 0:
        return {}
    # unbiased estimates may leave [0, 1]
    undecided = min(max(metrics["profile/undecided"] / metrics["profile/variance"], 0.0), 1.0)
    tokens, after = metrics["profile/tokens"], metrics["profile/tokens_after"]
    noise = max(metrics["profile/noise_after"], 0.0) / (metrics["profile/variance"] * tokens)
    gains = fork_gains([1 - after / tokens, 1.0], [1 - undecided, undecided], tokens, [noise])
    return {"profile/fork_gain": max(1.0, float(gains.max()))}


def fork_gains(
    ends: Sequence[float] | np.ndarray, decided: Sequence[float] | np.ndarray, tokens: float,
    behind: Sequence[float] | np.ndarray | None = None,
) -> np.ndarray:  # fmt: skip
    """Return [parts - 1, LINES]: the factor of squared signal over noise at equal tokens that one fork at the
    end of each part gives, into each number of lines, over the same baseline without forks.

    ``ends``: shares of a response's tokens at the ends of its parts, the last one 1; ``decided``: shares of
    the reward's variance that are decided in them, of sum 1; ``tokens``: those of a response; ``behind``:
    [parts - 1] n of each place, by default that of responses of one length.
    """
    ends, decided = np.asarray(ends, np.float64), np.asarray(decided, np.float64)
    # [parts, 1] noise up to the end of each part; the numbers of lines become columns
    noise = (ends * decided).cumsum()[:, None]  # with perfect baselines
    place, before, alone = ends[:-1, None], noise[:-1], noise[-1]
    undecided = 1 - decided.cumsum()[:-1, None]
    n = (1 - place) * undecided if behind is None else np.asarray(behind, np.float64)[:, None]
    # [parts - 1, LINES] the second formula of the module's docstring; `perfect` is the first
    means = place * (1 - undecided + undecided / LINES) + n / (LINES - 1)
    shared = undecided / tokens
    perfect = (before + (alone - before) / LINES + shared) / alone
    # both over the noise without forks; the larger, as a fork must pay with either baseline
    best = np.maximum(perfect, (means + shared) / (place + np.maximum(1 - place, n)))
    # every line pays for its tokens behind the fork
    return 1 / (best * (place + (1 - place) * LINES))


class Factor(NamedTuple):
    """Squared signal over noise at equal tokens, over that without forks or baseline, with its interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"x{self.value:.2g} [{self.low:.2g}, {self.high:.2g}]"


@dataclass(frozen=True)
class Profile:
    """Parts of a response that end at forks, and what is decided in them."""

    ends: np.ndarray
    """[parts] share of a response's tokens at the end of each; the last is 1."""
    decided: np.ndarray
    """[3, parts] share of the reward's variance that is decided in each, and the ends of its interval."""
    place: float
    """Share of a response's tokens before the best fork."""
    lines: int
    """Lines that it has."""
    gain: Factor
    """Gain of that fork over the same baseline without forks."""


def outcome_profile(rollouts: Sequence[Rollout]) -> Profile | None:
    """Return the profile of complete scored rollouts; None without forks or varying rewards, or of few."""
    prompts = len({rollout.prompt_id for rollout in rollouts})
    of_units: dict[Any, np.ndarray] = defaultdict(lambda: np.zeros((RANKS + 1, 3)))
    ranked = [by_rank(rollout) for rollout in rollouts]
    for rollout, ranks in zip(rollouts, ranked, strict=True):
        # rollouts of one prompt depend on each other, so prompts are resampled where there are enough
        of_units[rollout.prompt_id if prompts >= LEAST else rollout.key] += ranks
    sums = np.array([*of_units.values()]).reshape(-1, RANKS + 1, 3)
    return profile_of(sums, sum(ranks[0, 1] > 0 for ranks in ranked))


def profile_of(sums: np.ndarray, rollouts: int, lines: int = int(LINES[-1])) -> Profile | None:
    """Return the profile of [units, ranks, 3] sums of ``by_rank`` over ``rollouts``, whose best fork has at
    most ``lines`` lines; None where no line forks or no reward varies, or of fewer than ``LEAST`` units."""
    whole = sums.sum(0)
    if len(sums) < LEAST or whole[0, :2].min() <= 0:
        return None
    kept = [0]
    for rank in range(1, len(whole)):
        # ranks that lie close together make one place: their parts would be mostly noise
        if 0 < whole[rank, 1] <= whole[kept[-1], 1] - APART * whole[0, 1]:
            kept.append(rank)
    if len(kept) == 1:
        return None

    def parts(of: np.ndarray) -> np.ndarray:
        """Return [2, parts] ends and shares."""
        # [kept ranks] shares of the prompt's variance and tokens that are left at each fork
        variance, tokens = of[kept, :2].T / of[0, :2, None]
        # more tokens leave no more undecided: estimates are made monotone
        undecided = np.minimum.accumulate(np.clip(variance, 0, 1))
        ends = np.maximum.accumulate(1 - np.append(tokens[1:], 0.0))
        return np.array([ends, -np.diff(np.append(undecided, 0.0))])

    tokens = whole[0, 1] / rollouts

    def gains(of: np.ndarray) -> np.ndarray:
        ends, decided = parts(of)
        return fork_gains(ends, decided, tokens, of[kept[1:], 2].clip(0) / (of[0, 0] * tokens))

    # a resample in which no reward varies has no profile
    draws = [drawn for drawn in resampled(sums) if drawn[0, :2].min() > 0]
    low, high = np.quantile([parts(drawn)[1] for drawn in draws], [0.025, 0.975], axis=0)
    (ends, decided), value = parts(whole), gains(whole)
    least, most = np.quantile([value, *map(gains, draws)], [0.025, 0.975], axis=0)
    sure = least[:, : lines - 1]  # what is sure to give most
    best = divmod(int(sure.argmax()), sure.shape[1])
    # shares end at 0 and 1, where the value is the least or the most of all draws
    gain = Factor(*(float(of[best]) for of in (value, np.minimum(least, value), np.maximum(most, value))))
    return Profile(ends, np.array([decided, low, high]), float(ends[best[0]]), int(LINES[best[1]]), gain)


def resampled(sums: np.ndarray) -> np.ndarray:
    """Return [draws, ...] sums over resampled prompts; ``sums`` are those of each prompt."""
    count = len(sums)
    # [draws, units] how often each unit is drawn: all resamples are one matrix product
    times = np.random.default_rng(0).multinomial(count, np.full(count, 1 / count), DRAWS)
    return np.tensordot(times, sums, 1)
