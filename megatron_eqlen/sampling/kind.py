"""What a sampling kind is: how rollouts are generated, compared, drawn and counted.

    tokens ─Harvester─► rollout ─compare─► token tree and comparison units (objectives weigh them)
                           ├────picture──► what people see of it
                           └────shape────► harvest/... metrics

Each kind is a folder beside this file whose ``__init__`` holds its ``SamplingKind`` as ``KIND``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from megatron_eqlen.recipe import Recipe
from megatron_eqlen.sampling.comparison import ComparisonUnit, Penalty
from megatron_eqlen.sampling.harvester import Harvester, RolloutHeader, RolloutPart
from megatron_eqlen.sampling.picture import Picture
from megatron_eqlen.types import Metrics, Prompt, Rollout, TokenTree


def whole(rollout: Rollout, recipe: Recipe) -> bool:
    """It is trained when it is complete, all at once."""
    return not rollout.suspended


def all_open(rollout: Rollout, recipe: Recipe) -> float:
    """As many of its tracks are open as when it began."""
    return 1.0


class Draw(NamedTuple):
    """A whole response of a rollout, and how much it counts as a draw from the policy: responses that share a
    beginning are not drawn independently, and which of them there are may depend on their lengths."""

    weight: float
    """Of one rollout they add up to 1, and any mean over them with these weights is unbiased."""
    length: int
    """Tokens."""
    reward: float
    """The verifier's; 0 where it did not end by itself."""


def no_draws(rollout: Any) -> Iterable[Draw]:
    return ()


@dataclass(frozen=True)
class SamplingKind:
    """One value of the recipe's ``sampling``."""

    name: str
    rollout: type[Any]
    """Its kind of rollout, a dataclass of ``types``."""
    harvesters: Callable[[Sequence[Prompt], Recipe, frozenset[int], int], Sequence[Harvester]]
    """(prompts, recipe, eos_token_ids, seed) -> what harvests them, those of a prompt next to each other."""
    compare: Callable[[Any, Recipe, Penalty], tuple[TokenTree, list[ComparisonUnit]]]
    """(scored rollout, recipe, length penalty) -> its token tree, and those units over the tree's nodes whose
    rewards became final in this step: each unit is in one step."""
    picture: Callable[[Any], Picture]
    parts: Callable[[Any], list[RolloutPart]]
    """How a rollout is recorded: its segments, flat."""
    join: Callable[[RolloutHeader, Sequence[RolloutPart]], Any]
    """The rollout from its parts."""
    shape: Callable[[Sequence[Any]], Metrics]
    """Rollouts of this kind (at least one) -> ``harvest/...`` metrics: how many, how long, how they ended."""
    compared: Callable[[Sequence[ComparisonUnit], Sequence[Any], Recipe], Metrics]
    """(units of a step, its rollouts, recipe) -> ``objective/...`` metrics that only this kind has."""
    takes_part: Callable[[Any, Recipe], bool] = whole
    """(scored rollout, recipe) -> whether it is one of those that the step trains and averages over. Every
    rollout is in one step at least; one that is trained in parts (see ``compare``) in several."""
    draws: Callable[[Any], Iterable[Draw]] = no_draws
    """A whole scored rollout as draws from the policy: ``policy/...`` metrics, alike for all kinds."""
    open_share: Callable[[Any, Recipe], float] = all_open
    """(suspended rollout, recipe) -> how many of its tracks are open, of those that it began with."""
