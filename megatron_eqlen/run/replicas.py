"""Engine replicas: the ranks that drive them, and results that all ranks share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch.distributed as dist

from megatron_eqlen.processes.collector import collector_paused
from megatron_eqlen.processes.distributed import gather
from megatron_eqlen.types import Prompt, Rollout, training_order

Item = TypeVar("Item")


class Replicas:
    """Assigns the world's ranks to engine replicas of ``engine_size`` ranks each. ``in_step``: all ranks of a
    replica make the same calls (an engine inside the ranks); otherwise its first rank drives it alone."""

    def __init__(self, engine_size: int, in_step: bool = True) -> None:
        rank, world = dist.get_rank(), dist.get_world_size()
        self.count = world // engine_size
        self.mine = rank // engine_size
        self.leads = rank % engine_size == 0
        """True if this rank records and reports for its replica."""
        self.drives = self.leads or in_step
        self.place, self.graders = (rank % engine_size, engine_size) if in_step else (0, 1)
        """This rank's number among the ranks of its replica that grade, and the number of these."""

    def share(self, items: Sequence[Item]) -> list[Item]:
        """Return this rank's part of ``items``, which are the same on every rank."""
        return list(items[self.mine :: self.count]) if self.drives else []

    def grades(self, prompt: Prompt, index: int) -> bool:
        """Return True if this rank grades a prompt's rollout number ``index``, provided its replica generates
        it. It is known beforehand, so that a response can be graded as soon as it ends."""
        # consecutive prompts of a replica differ by `count`; the index spreads each prompt over the ranks
        return (prompt.number // self.count + index) % self.graders == self.place

    def keeps(self, prompt: Prompt, index: int) -> bool:
        """Return True if this rank needs all columns of a rollout, to record or to grade it."""
        return self.leads or self.grades(prompt, index)

    def part(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """Return the rollouts that this rank grades; every rank of the replica has all of ``rollouts``."""
        return [rollout for rollout in rollouts if self.grades(rollout.prompt, rollout.index)]


@collector_paused()
def rollouts_of_all_ranks(part: Sequence[Rollout], prompts: Sequence[Prompt]) -> list[Rollout]:
    """Return all ranks' rollouts in training order, from this rank's ``part`` and all ranks' ``prompts``.
    Collective. This rank becomes the home of its part's arrays and gets skeletons of the other rollouts."""
    rank, by_id = dist.get_rank(), {prompt.prompt_id: prompt for prompt in prompts}
    for sampled in (sampled for rollout in part for sampled in rollout.parts):
        sampled.home = rank
    everyone = gather([rollout.skeleton() for rollout in part])
    for rollout in everyone:
        # skeletons came with the ids of prompts alone
        rollout.prompt = by_id[rollout.prompt_id]
    # this rank's own take the place of their skeletons
    rollouts = {rollout.key: rollout for rollout in (*everyone, *part)}
    return sorted(rollouts.values(), key=training_order)
