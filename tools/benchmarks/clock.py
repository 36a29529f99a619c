"""Seconds and bytes of a piece of work, on a CPU or a GPU."""

from __future__ import annotations

import ctypes
import gc
import time
from collections.abc import Callable

import torch

from megatron_eqlen.training import peak_memory


def fastest(work: Callable[[], object], repeat: int) -> float:
    """Return the seconds of the fastest of ``repeat`` calls, after one more, which may compile."""
    timed(work)
    return min(timed(work) for _ in range(repeat))


def timed(function: Callable[[], object]) -> float:
    """Return the seconds of one call: on a CPU this process's CPU time, which other processes do not disturb;
    on a GPU wall-clock time, with the device's work."""
    clock = time.perf_counter if torch.cuda.is_available() else time.process_time
    started = clock()
    function()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return clock() - started


def memory(reset: bool = False) -> int:
    """Return the peak bytes in use since the last reset; with ``reset``, forget the peak and return the
    present level."""
    if reset:
        if not torch.cuda.is_available():
            gc.collect()
            ctypes.CDLL("libc.so.6").malloc_trim(0)
        peak_memory.begin()
    return peak_memory.most()
