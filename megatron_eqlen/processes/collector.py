"""Python's collector of reference cycles, paused where it would cost seconds and find nothing."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """Collect nothing meanwhile: while millions of records are made, the collector walks over them again and
    again."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


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
            gc.freeze()
