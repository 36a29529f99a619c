"""Advice from any scored rollouts, before or while they train: what forks and token baselines are worth."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from megatron_eqlen.objectives.token_baseline import fitted, prompt_mean, token_baselines
from megatron_eqlen.recipe import Recipe
from megatron_eqlen.sampling import KINDS
from megatron_eqlen.sampling.comparison import ComparisonUnit, no_penalty
from megatron_eqlen.sampling.profile import LINES, RANKS, by_rank, fork_gains, without_profile
from megatron_eqlen.types import Rollout, rollout_key

APART = 0.05
"""Least share of the tokens between two places of forks."""
DRAWS, LEAST = 400, 10
"""Resamples for intervals of 95%: of the prompts, or of the rollouts of fewer than ``LEAST`` prompts. Fewer
rollouts say nothing."""


class Factor(NamedTuple):
    """Squared signal over noise at equal tokens, over that without forks or token baseline, with its
    interval."""

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
    """Return the profile of complete scored rollouts; None where no line forks, no reward varies, or there
    are too few."""
    prompts = len({rollout.prompt_id for rollout in rollouts})
    of_units: dict[Any, np.ndarray] = defaultdict(lambda: np.zeros((RANKS + 1, 3)))
    ranked = [by_rank(rollout) for rollout in rollouts]
    for rollout, ranks in zip(rollouts, ranked, strict=True):
        of_units[rollout.prompt_id if prompts >= LEAST else rollout_key(rollout)] += ranks
    sums = np.array([*of_units.values()]).reshape(-1, RANKS + 1, 3)  # [units, ranks, by_rank's]
    whole = sums.sum(0)
    if len(sums) < LEAST or whole[0, :2].min() <= 0:
        return None
    kept = [0]
    for rank in range(1, RANKS + 1):
        if 0 < whole[rank, 1] <= whole[kept[-1], 1] - APART * whole[0, 1]:
            kept.append(rank)
    if len(kept) == 1:
        return None

    def parts(of: np.ndarray) -> np.ndarray:
        """Return [2, parts] ends and shares."""
        variance, tokens = of[kept, :2].T / of[0, :2, None]
        undecided = np.minimum.accumulate(np.clip(variance, 0, 1))
        ends = np.maximum.accumulate(1 - np.append(tokens[1:], 0.0))
        return np.array([ends, -np.diff(np.append(undecided, 0.0))])

    tokens = whole[0, 1] / sum(ranks[0, 1] > 0 for ranks in ranked)

    def gains(of: np.ndarray) -> np.ndarray:
        ends, decided = parts(of)
        return fork_gains(ends, decided, tokens, of[kept[1:], 2].clip(0) / (of[0, 0] * tokens))

    draws = [drawn for drawn in _resampled(sums) if drawn[0, :2].min() > 0]
    low, high = np.quantile([parts(drawn)[1] for drawn in draws], [0.025, 0.975], axis=0)
    (ends, decided), value = parts(whole), gains(whole)
    least, most = np.quantile([value, *map(gains, draws)], [0.025, 0.975], axis=0)
    best = divmod(int(least.argmax()), len(LINES))  # what is sure to give most
    # shares end at 0 and 1, where the value is the least or the most of all draws
    gain = Factor(*(float(of[best]) for of in (value, np.minimum(least, value), np.maximum(most, value))))
    return Profile(ends, np.array([decided, low, high]), float(ends[best[0]]), int(LINES[best[1]]), gain)


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
    low, high = np.quantile([d[0] / d[1] for d in _resampled(sums) if d.min() > 0], [0.025, 0.975])
    return Factor(float(sums[:, 0].sum() / sums[:, 1].sum()), float(low), float(high))


def _resampled(sums: np.ndarray) -> np.ndarray:
    """Return [draws, ...] sums over resampled prompts; ``sums`` are those of each prompt."""
    count = len(sums)
    times = np.random.default_rng(0).multinomial(count, np.full(count, 1 / count), DRAWS)
    return np.tensordot(times, sums, 1)


def advice(rollouts: Sequence[Rollout], recipe: Recipe) -> tuple[Profile | None, str]:
    """Return the profile of complete scored rollouts, and a sentence on what pays: forks do where the whole
    interval of their gain is above 1."""
    selection, baseline = without_profile(rollouts, recipe), baseline_gain(rollouts, recipe)
    profile = None if selection else outcome_profile(rollouts)
    tree = recipe.tree_sampling
    after = f" after {tree.marker!r}" if recipe.sampling == "tree" and tree.fork == "marker" else ""
    if profile is None:
        few = f"no line forked, no reward varies, or there are fewer than {LEAST} rollouts"
        forked = f"forks{after}: not known, as {selection or few}"
    else:
        # ends of the profile's parts, as shares of a response
        places = ", ".join(f"{end:.0%}" for end in profile.ends[:-1])
        pay = f": at {profile.place:.0%} {profile.lines} lines give about {profile.gain} signal per token,"
        pays = pay if profile.gain.low > 1 else " are not seen to pay"
        forked = f"forks{after} at {places} of a response{pays} over the same baseline alone"
    sentence = f"{forked}; a token baseline (loss.baseline: fitted): {baseline or 'not known'}"
    return profile, f"{sentence} ({len({rollout.prompt_id for rollout in rollouts})} prompts)"
