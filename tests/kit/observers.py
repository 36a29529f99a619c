"""Observers of harvests for tests."""

from __future__ import annotations

from collections.abc import Callable

from megatron_eqlen.sampling.harvester import Harvester, HarvestObserver
from megatron_eqlen.types import Part


class OnPart(HarvestObserver):
    """Calls a function with each part that has become final."""

    def __init__(self, call: Callable[[Harvester, Part], None]) -> None:
        self.call = call

    def part_finished(self, harvester: Harvester, part: Part) -> None:
        self.call(harvester, part)
