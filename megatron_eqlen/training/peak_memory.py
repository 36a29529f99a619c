"""The most memory that a stage had: of the GPU, as PyTorch's allocator knows it, or else of the process."""

from __future__ import annotations

import contextlib
from pathlib import Path

import torch

from megatron_eqlen.types import Metrics

RESET = Path("/proc/self/clear_refs")
STATUS = Path("/proc/self/status")


def begin() -> None:
    """Forget what was the most so far."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        return
    with contextlib.suppress(OSError):  # where that is not allowed it is the most since the process began
        RESET.write_text("5")


def measured(stage: str) -> Metrics:
    """Bytes since ``begin``, as ``memory/peak/STAGE``; on a GPU also what the allocator held of it."""
    if torch.cuda.is_available():
        return {
            f"memory/peak/{stage}": float(torch.cuda.max_memory_allocated()),
            f"memory/reserved/{stage}": float(torch.cuda.max_memory_reserved()),
        }
    lines = STATUS.read_text(encoding="ascii").splitlines()
    kib = next(line.split()[1] for line in lines if line.startswith("VmHWM:"))
    return {f"memory/peak/{stage}": 1024.0 * int(kib)}
