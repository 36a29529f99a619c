"""Input of one harvest besides its engine."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import KW_ONLY, dataclass, field

from megatron_eqlen.environments.conversation import Conversations
from megatron_eqlen.recipe import Recipe
from megatron_eqlen.record.partial import HarvestProgress
from megatron_eqlen.sampling.harvester import Marker, every_rollout
from megatron_eqlen.sampling.kind import SamplingKind
from megatron_eqlen.types import Prompt


@dataclass(frozen=True)
class HarvestPlan:
    """Prompts to harvest, sampling settings, and rollouts to resume."""

    prompts: Sequence[Prompt]
    recipe: Recipe
    eos_token_ids: Collection[int]
    seed: int
    """Differs from step to step. Tracks hash it with prompt id, rollout number and own number."""
    _: KW_ONLY
    progress: HarvestProgress = field(default_factory=HarvestProgress)
    """Recorded results. A prompt that has a rollout of an earlier step names no other rollouts."""
    keeps_columns: Callable[[Prompt, int], bool] = every_rollout
    """(prompt, rollout's number) -> whether this rank keeps all columns, not the token ids alone."""
    marker: Marker | None = None
    """Marker that trees fork after (``tree_sampling.marker``)."""
    kind: SamplingKind | None = None
    """Maker of the rollouts; None: the recipe's sampling."""
    conversations: Conversations | None = None
    """Environments that answer the ends of turns; None: a response is one turn."""
