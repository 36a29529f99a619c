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
    with contextlib.suppress(OSError):  # where that is not allowed it is the most since the process began
        forget()


def forget() -> None:
    """Raises OSError where a process may not do that."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    else:
        RESET.write_text("5")


def most() -> int:
    """Bytes that were in use at one time since then."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    lines = STATUS.read_text(encoding="ascii").splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith("VmHWM:")))


def measured(stage: str) -> Metrics:
    """Bytes since ``begin``, as ``memory/peak/STAGE``; on a GPU also what the allocator held of it."""
    found = {f"memory/peak/{stage}": float(most())}
    if torch.cuda.is_available():
        found[f"memory/reserved/{stage}"] = float(torch.cuda.max_memory_reserved())
    return found
