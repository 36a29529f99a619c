"""Which rank drives which engine replica, and what all ranks learn of the replicas' results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch.distributed as dist

from megatron_eqlen.metrics import at_once
from megatron_eqlen.sampling.skeleton import skeleton, with_prompt
from megatron_eqlen.training.distributed import gather
from megatron_eqlen.types import Metrics, Prompt, Rollout, rollout_key, training_order

Item = TypeVar("Item")


class Replicas:
    """The world's ranks as engine replicas of ``engine_size`` ranks each.

    ``in_step``: all ranks of a replica make the same calls (an engine inside the ranks); otherwise the
    first rank of a replica drives it alone and the others have nothing to do.
    """

    def __init__(self, engine_size: int, in_step: bool = True) -> None:
        rank, world = dist.get_rank(), dist.get_world_size()
        self.count = world // engine_size
        self.mine = rank // engine_size
        self.leads = rank % engine_size == 0
        """Whether this rank records and reports for its replica."""
        self.drives = self.leads or in_step
        self.graders = slice(rank % engine_size, None, engine_size) if in_step else slice(None)
        """Which of its replica's rollouts this rank grades."""

    def share(self, items: Sequence[Item]) -> list[Item]:
        """This rank's part of ``items``, which are the same on every rank."""
        return list(items[self.mine :: self.count]) if self.drives else []

    def part(self, items: Sequence[Item]) -> list[Item]:
        """This rank's part of what its replica made, of which every rank of the replica has all."""
        return list(items[self.graders])

    def combine(self, metrics: Metrics) -> Metrics:
        """The merged metrics of all replicas, from this one's."""
        return at_once(gather([metrics] if self.leads else []))


def shared(part: Sequence[Rollout], prompts: Sequence[Prompt]) -> list[Rollout]:
    """All ranks' rollouts in training order, from this rank's ``part`` of them. Collective.

    This rank becomes the home of its part's arrays; of the others it gets skeletons. ``prompts``: all ranks'.
    """
    rank, by_id = dist.get_rank(), {prompt.prompt_id: prompt for prompt in prompts}
    for segment in (segment for rollout in part for segment in rollout.segments()):
        segment.home = rank
    whole = {rollout_key(rollout): rollout for rollout in part}
    everyones = gather([skeleton(rollout) for rollout in part])
    rollouts = (whole.get(rollout_key(bare)) or with_prompt(bare, by_id) for bare in everyones)
    return sorted(rollouts, key=training_order)
