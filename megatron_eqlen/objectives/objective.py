"""Objectives as data: how a comparison unit becomes a gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from megatron_eqlen.recipe import AggregationName

Estimator = Callable[[Sequence[float], Sequence[int]], list[float]]
"""(rewards, lengths in tokens) of a unit's members -> their advantages; see ``advantages``."""

Ratio = Literal["token", "sequence", "none", "vespo", "cispo"]


@dataclass(frozen=True)
class Objective:
    """One method. The keys of a recipe's ``loss`` that are set replace its own (``registry.resolve``)."""

    name: str
    advantage: Estimator
    aggregation: AggregationName
    """Average over tokens."""
    ratio: Ratio
    """``token``: clipped ratio of each token. ``sequence``: clipped geometric mean over the segment.
    ``none``: plain -A log pi. ``vespo``: the detached kernel phi(W) in front of -A log pi. ``cispo``: the
    clipped ratio of each token, detached, in front of -A log pi."""
    clip_ratio_low: float | None = None
    """The ratio is clipped below 1 - this; None: not clipped."""
    clip_ratio_high: float | None = None
    clip_ratio_c: float | None = None
    """Dual clip: with a negative advantage the loss of a token is at most -c x advantage."""
    whitened: Literal["scale", "standardize"] | None = None
    """``scale``: advantages are divided by their population std in the whole batch (DLER, REINFORCE++ with
    baseline). ``standardize``: the batch's mean is subtracted before (REINFORCE++)."""
    overlong_buffer: int = 0
    """Tokens before max_response_length where the length penalty starts; 0: no penalty."""
    overlong_factor: float = 1.0
    dynamic_sampling: bool = False
    """Prompts whose rewards are all equal are replaced by freshly sampled ones."""
    vespo_positive: tuple[float, float] = (2.0, 3.0)
    """(k, lambda) of phi(W) = W^k exp(lambda (1 - W)) where the advantage is >= 0."""
    vespo_negative: tuple[float, float] = (3.0, 2.0)

    @property
    def advantage_name(self) -> str:
        """Name of the estimator as it is printed: ``grpo``, ``Gr3(alpha=0.33)``."""
        return getattr(self.advantage, "__name__", repr(self.advantage))

    @property
    def clips(self) -> bool:
        return self.clip_ratio_low is not None
