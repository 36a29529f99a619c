"""Objectives as data: how a comparison unit becomes a gradient."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Literal, Protocol

from megatron_eqlen.objectives.advantages import Estimator
from megatron_eqlen.objectives.aggregation import Aggregation
from megatron_eqlen.objectives.surrogates import Surrogate
from megatron_eqlen.objectives.token_baseline import TokenBaseline, of_unit
from megatron_eqlen.recipe import Recipe


@dataclass(frozen=True)
class Objective:
    """One method. The keys of a recipe's ``loss`` that are set replace its own (``registry.resolve``)."""

    name: str
    advantage: Estimator
    aggregation: Aggregation
    """Average over tokens."""
    surrogate: Surrogate
    """Loss of a token before its weight."""
    whitened: Literal["scale", "standardize"] | None = None
    """``scale``: advantages are divided by their population std in the whole batch (DLER, REINFORCE++ with
    baseline). ``standardize``: the batch's mean is subtracted before (REINFORCE++)."""
    baseline: TokenBaseline = of_unit
    """Reward that each token is compared with: the advantage is the difference."""
    overlong_buffer: int = 0
    """Tokens before max_response_length where the length penalty starts; 0: no penalty."""
    overlong_factor: float = 1.0
    dynamic_sampling: bool = False
    """Prompts whose rewards are all equal are replaced by freshly sampled ones."""
    length_quantiles: tuple[float, float, float] | None = None
    """LSPO's (low, high, max): dynamic sampling also replaces prompts whose mean response length is neither
    up to the quantile low nor from high to max."""
    rewards: Literal["together", "apart"] = "together"
    """``apart``: ``advantage`` takes the rewards of each name; the results are added with their weights."""
    refuses: Mapping[str, str] = MappingProxyType({})
    """Why the method cannot be used with a setting (``checks.settings``); parts declare reasons as well."""
    forks: Literal["apart", "equal", "pooled"] = "apart"
    """Comparison units of a tree. ``apart``: each fork is one, with its share of the rollout. ``equal``: all
    forks weigh the same (TreeRPO). ``pooled``: all parts behind forks are one (GRPO-MA)."""

    @property
    def has_ratio(self) -> bool:
        """True if the surrogate depends on the old log-probs."""
        return getattr(self.surrogate, "has_ratio", True)


class ResolvedRecipe(Protocol):
    """A recipe with its objective: what this folder needs of a ``Job``, which alone resolves recipes."""

    @property
    def recipe(self) -> Recipe: ...

    @cached_property
    def objective(self) -> Objective: ...
