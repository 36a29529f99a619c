"""Peak memory of a stage: of the GPU, from PyTorch's allocator, or else of the process."""

from __future__ import annotations

import contextlib
from pathlib import Path

import torch

from megatron_eqlen.types import Metrics

RESET = Path("/proc/self/clear_refs")
STATUS = Path("/proc/self/status")


def begin() -> None:
    """Reset the peak."""
    with contextlib.suppress(OSError):  # if not allowed, the peak covers the process's lifetime
        forget()


def forget() -> None:
    """Reset the peak. Raises OSError if a process is not allowed to."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    else:
        RESET.write_text("5")


def most() -> int:
    """Return the peak in bytes since the last reset."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    lines = STATUS.read_text(encoding="ascii").splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith("VmHWM:")))


def measured(stage: str) -> Metrics:
    """Return the peak since ``begin`` as ``memory/peak/STAGE``; on a GPU also the allocator's reserved
    memory."""
    metrics = {f"memory/peak/{stage}": float(most())}
    if torch.cuda.is_available():
        metrics[f"memory/reserved/{stage}"] = float(torch.cuda.max_memory_reserved())
    return metrics
