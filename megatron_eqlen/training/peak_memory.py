"""Memory of a stage: of the GPU, from PyTorch's allocator and from CUDA, or else of the process."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import torch

from megatron_eqlen.types import Metrics

RESET = Path("/proc/self/clear_refs")
STATUS = Path("/proc/self/status")
LESS = {
    "train": "packing.max_tokens_per_row, packing.logits_chunk, parallel.recompute: full, optimizer.offload",
    "unpark": "optimizer.offload, optimizer.precision: bfloat16, more GPUs for `parallel`",
    "sync": "rollout.park_trainer: all",
    "harvest": "rollout.gpu_memory_utilization, rollout.kv_cache_gib",
    "evaluate": "rollout.gpu_memory_utilization, rollout.kv_cache_gib",
}
"""Keys that make a stage need less of a GPU."""


def begin() -> None:
    """Reset the peak."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        return
    with contextlib.suppress(OSError):  # if not allowed, the peak covers the process's lifetime
        # 5 sets the process's VmHWM back to what it uses now (proc(5))
        RESET.write_text("5")


def most() -> int:
    """Return the peak in bytes since the last reset."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    lines = STATUS.read_text(encoding="ascii").splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith("VmHWM:")))


def measured(stage: str, planned: Mapping[str, float] = MappingProxyType({})) -> Metrics:
    """Return the peak since ``begin`` as ``memory/peak/STAGE``; on a GPU also the allocator's reserved
    memory, what CUDA says is used, and the plan's number. ``planned``: bytes by stage."""
    metrics = {f"memory/peak/{stage}": float(most())}
    if torch.cuda.is_available():
        metrics[f"memory/reserved/{stage}"] = float(torch.cuda.max_memory_reserved())
        free, total = torch.cuda.mem_get_info()
        metrics[f"memory/device/{stage}"] = float(total - free)
        if stage in planned:
            metrics[f"memory/planned/{stage}"] = planned[stage]
    return metrics


def shortage(stage: str, planned: Mapping[str, float]) -> str:
    """Return who holds how much of a GPU that ran out of memory in ``stage``, and the keys that need less."""
    free, total = torch.cuda.mem_get_info()
    tensors, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    plan = f", for which the plan counts {planned[stage] / 1e9:.1f}" if stage in planned else ""
    less = LESS.get(stage, "see `eqlen plan`")
    return (
        f"stage {stage}{plan}: {(total - free) / 1e9:.1f} of {total / 1e9:.1f} GB are in use; PyTorch has "
        f"reserved {reserved / 1e9:.1f}, of which tensors hold {tensors / 1e9:.1f} (reserved counts the pool "
        f"of a sleeping engine); NCCL, CUDA and other processes hold the rest. To need less: {less}"
    )
