"""Advice from any scored rollouts, before or while they train: what forks and token baselines are worth."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from megatron_eqlen.objectives.token_baseline import fitted, prompt_mean, token_baselines
from megatron_eqlen.recipe import Recipe
from megatron_eqlen.sampling import KINDS
from megatron_eqlen.sampling.comparison import ComparisonUnit, no_penalty
from megatron_eqlen.sampling.profile import fork_gain, forks
from megatron_eqlen.types import Rollout

RANKS, APART = 8, 0.05
"""Most forks of a line that are looked at, and the least share of the tokens between two of them."""
DRAWS = 400
"""Resamples of the prompts for intervals of 95%."""


class Factor(NamedTuple):
    """Squared signal over noise at equal tokens, over that of independent responses, with its interval."""

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
    gain: Factor
    """Factor of the best forks at these places."""

    @property
    def lines(self) -> int:
        """Best number of lines after a fork, if there is one."""
        after, undecided = 1 - self.ends[0], min(self.decided[0, -1], 0.999)
        return max(round((undecided / (1 - undecided) / after) ** 0.5), 1)


def outcome_profile(rollouts: Sequence[Rollout]) -> Profile | None:
    """Return the profile of complete scored rollouts; None where no line forks or no reward varies."""
    of_prompts: dict[str, np.ndarray] = defaultdict(lambda: np.zeros((RANKS + 1, 2)))
    for rollout in rollouts:
        for fork in forks(rollout):
            if fork.behind <= RANKS:
                amount = fork.weight * np.array([fork.variance, fork.after])
                of_prompts[rollout.prompt_id][fork.behind] += amount
    sums = np.array([*of_prompts.values()]).reshape(-1, RANKS + 1, 2)  # [prompts, ranks, (variance, tokens)]
    whole = sums.sum(0)
    if whole[0].min() <= 0 or whole[1, 1] <= 0:
        return None
    kept = [0]
    for rank in range(1, RANKS + 1):
        if 0 < whole[rank, 1] <= whole[kept[-1], 1] - APART * whole[0, 1]:
            kept.append(rank)
    if len(kept) == 1:
        return None

    def parts(of: np.ndarray) -> np.ndarray:
        """Return [2, parts] ends and shares."""
        variance, tokens = of[kept].T / of[0][:, None]
        undecided = np.minimum.accumulate(np.clip(variance, 0, 1))
        ends = np.maximum.accumulate(1 - np.append(tokens[1:], 0.0))
        return np.array([ends, -np.diff(np.append(undecided, 0.0))])

    draws = [parts(drawn) for drawn in _resampled(sums) if drawn[0].min() > 0]
    low, high = np.quantile([decided for _, decided in draws], [0.025, 0.975], axis=0)
    ends, decided = found = parts(whole)
    gain = _factor(found, draws, lambda of: fork_gain(*of))
    return Profile(ends, np.array([decided, low, high]), gain)


def baseline_gain(rollouts: Sequence[Rollout], recipe: Recipe) -> Factor | None:
    """Return what ``loss.baseline: fitted`` gives these rollouts; None where nothing can be compared. Scores
    of tokens are taken for orthogonal and equally large."""
    units: list[ComparisonUnit] = []
    for number, rollout in enumerate(rollouts):
        for unit in KINDS["tree"].compare(rollout, recipe, no_penalty)[1]:
            unit.rollout = number
            units.append(unit)
    # [prompts, (with the prompt's mean, fitted)]
    noise: dict[str, np.ndarray] = defaultdict(lambda: np.zeros(2))
    for column, baseline in enumerate((prompt_mean, fitted)):
        values = token_baselines(units, rollouts, baseline, recipe.rollout.max_response_length)
        for unit, of_unit in zip(units, values, strict=True):
            weight = (unit.share or 0.0) / len(unit.members)
            for reward, known in zip(unit.rewards, of_unit, strict=True):
                if known is not None:
                    noise[unit.prompt_id][column] += weight**2 * np.square(reward - known).sum()
    sums = np.array([*noise.values()]).reshape(-1, 2)
    if not sums.size or sums.sum(0).min() <= 0:
        return None
    draws = [drawn for drawn in _resampled(sums) if drawn.min() > 0]
    return _factor(sums.sum(0), draws, lambda of: float(of[0] / of[1]))


def _resampled(sums: np.ndarray) -> np.ndarray:
    """Return [draws, ...] sums over resampled prompts; ``sums`` are those of each prompt."""
    count = len(sums)
    times = np.random.default_rng(0).multinomial(count, np.full(count, 1 / count), DRAWS)
    return np.tensordot(times, sums, 1)


def _factor(whole: np.ndarray, draws: Sequence[np.ndarray], of: Callable[[np.ndarray], float]) -> Factor:
    low, high = np.quantile([of(drawn) for drawn in draws], [0.025, 0.975])
    return Factor(of(whole), float(low), float(high))


def advice(rollouts: Sequence[Rollout], recipe: Recipe) -> tuple[Profile | None, str]:
    """Return the profile of complete scored rollouts, and a sentence on what pays."""
    profile, baseline = outcome_profile(rollouts), baseline_gain(rollouts, recipe)
    tree = recipe.tree_sampling
    after = f" after {tree.marker!r}" if recipe.sampling == "tree" and tree.fork == "marker" else ""
    if profile is None:
        forked = f"forks{after}: not known, as no line forked or no reward varies"
    else:
        places = ", ".join(f"{end:.0%}" for end in profile.ends[:-1])
        forked = f"forks{after} at {places} of a response"
        if len(profile.ends) > 2:
            forked += f": about {profile.gain} signal per token"
        elif profile.lines > 1:
            forked += f": about {profile.gain} signal per token with {profile.lines} lines a fork"
        else:
            forked += (
                f" do not pay: {profile.decided[0, -1]:.1%} of the reward's variance is decided behind them"
            )
    sentence = f"{forked}; a token baseline (loss.baseline: fitted): {baseline or 'not known'}"
    return profile, f"{sentence} ({len({rollout.prompt_id for rollout in rollouts})} prompts)"
