"""Imports of heavy libraries at less cost: they are seconds of every start, in each process that trains or
generates."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def importing(*without: str) -> Iterator[None]:
    """Surround imports. In the block, garbage collection does not walk through all modules again and again
    (nor afterwards), and modules ``without`` raise ImportError."""
    collects = gc.isenabled()
    gc.disable()
    absent = [name for name in without if name not in sys.modules]
    sys.modules.update(dict.fromkeys(absent))  # pyright: ignore[reportCallIssue, reportArgumentType] (the documented way)
    try:
        yield
    finally:
        for name in absent:
            del sys.modules[name]
        gc.freeze()
        if collects:
            gc.enable()
