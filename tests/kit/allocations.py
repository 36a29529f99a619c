"""Measures the memory of tensors."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity


def peak_bytes(function: Callable[..., object], *args: object) -> int:
    """Return the peak bytes of CPU tensors made in ``function``, by the allocator's own account."""
    with torch.profiler.profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profile:
        function(*args)
    events = profile.profiler.kineto_results.events()
    changes = [(event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"]
    level = peak = 0
    for _, change in sorted(changes, key=lambda entry: entry[0]):
        level += change
        peak = max(peak, level)
    return peak
