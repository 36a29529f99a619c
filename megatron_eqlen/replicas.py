"""Which rank drives which engine replica, and how the replicas' results are gathered."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch.distributed as dist

from megatron_eqlen.metrics import at_once
from megatron_eqlen.training.distributed import gather
from megatron_eqlen.types import Metrics

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
