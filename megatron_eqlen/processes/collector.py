"""Python's collector of reference cycles, paused where it would cost seconds and find nothing."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """Collect nothing in the block: the collector would walk over millions of new records again and again."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


YOUNG = 50_000, 10, 2**31 - 1
"""Thresholds of a collector that never walks over what two collections left."""


@contextmanager
def young_collected() -> Iterator[None]:
    """Collect among new objects alone in the block: a harvest makes millions of records that stay, which the
    collector would walk over again and again. Cycles that live longer are found afterwards."""
    before = gc.get_threshold()
    gc.set_threshold(*YOUNG)
    try:
        yield
    finally:
        if before != YOUNG:  # of a harvest in another thread
            gc.set_threshold(*before)


@contextmanager
def importing(*without: str) -> Iterator[None]:
    """Surround imports of heavy libraries: the collector does not walk through all modules again and again,
    nor afterwards. Modules ``without`` raise ImportError in the block."""
    absent = [name for name in without if name not in sys.modules]
    sys.modules.update(dict.fromkeys(absent))  # pyright: ignore[reportCallIssue, reportArgumentType] (the documented way)
    with collector_paused():
        try:
            yield
        finally:
            for name in absent:
                del sys.modules[name]
            # Modules stay: the collector need not look at them again.
            gc.freeze()
