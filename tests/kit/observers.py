"""Observers of harvests for tests."""

from __future__ import annotations

from collections.abc import Callable

from megatron_eqlen.sampling.harvester import Harvester, HarvestObserver, RolloutPart


class OnPart(HarvestObserver):
    """Calls a function with each part that has become final."""

    def __init__(self, call: Callable[[Harvester, RolloutPart], None]) -> None:
        self.call = call

    def part_finished(self, harvester: Harvester, part: RolloutPart) -> None:
        self.call(harvester, part)
