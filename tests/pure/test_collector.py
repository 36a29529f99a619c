"""Python's collector while a harvest makes records."""

from __future__ import annotations

import gc
import weakref
from contextlib import suppress

from megatron_eqlen.processes.collector import YOUNG, young_collected


class Cycle:
    def __init__(self) -> None:
        self.itself = self


def test_a_harvest_collects_new_cycles_and_leaves_the_collector_as_it_was():
    before = gc.get_threshold()
    oldest = gc.get_stats()[2]["collections"]
    with suppress(ValueError), young_collected():
        with young_collected():  # of an evaluation, say
            assert gc.get_threshold() == YOUNG
        cycle = weakref.ref(Cycle())
        kept = [[] for _ in range(3 * YOUNG[0])]
        assert cycle() is None, "memory is bounded"
        assert len(kept) == 3 * YOUNG[0]
        assert gc.get_stats()[2]["collections"] == oldest, "old records are not looked at again"
        raise ValueError
    assert gc.get_threshold() == before
