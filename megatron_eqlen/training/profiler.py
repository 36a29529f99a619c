"""PyTorch's profiles of a step on every rank, in the run's folder ``profile/``:

step-00000003-rank-0.json.gz    a trace in Chrome's format (perfetto.dev, chrome://tracing), which names
                                stages
out-of-memory-rank-0.pickle     contents of a GPU's memory when it ran out (pytorch.org/memory_viz)
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from megatron_eqlen.files import replaced, step_name
from megatron_eqlen.recipe import ProfileRecipe

EVENTS = 100_000
"""Newest allocations and releases in a memory snapshot, with their stacks: some KB each."""


class Profiler:
    """Profiler of this rank; ``folder`` is the run's ``profile/``."""

    def __init__(self, folder: Path, recipe: ProfileRecipe) -> None:
        self._folder, self._recipe = folder, recipe
        self._profile: profile | None = None

    def begin(self, step: int) -> None:
        """Begin a trace if step ``step`` (from 1) is one of the recipe's."""
        if step not in self._recipe.steps or self._profile is not None:
            return
        gpu = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
        self._profile = profile(activities=[ProfilerActivity.CPU, *gpu], profile_memory=self._recipe.memory)
        self._profile.start()

    def end(self, step: int) -> None:
        """End the trace and write it, if this was one of the recipe's steps."""
        if self._profile is None or step not in self._recipe.steps:
            return
        self._profile.stop()
        self._folder.mkdir(parents=True, exist_ok=True)
        name = f"{step_name(step)}-rank-{dist.get_rank()}.json.gz"
        with replaced(self._folder / name) as partial:
            compressed = partial.with_name(f"{partial.name}.gz")  # torch reads the suffix
            try:
                self._profile.export_chrome_trace(str(compressed))
                compressed.rename(partial)
            finally:
                compressed.unlink(missing_ok=True)
        self._profile = None


@contextlib.contextmanager
def snapshot_when_out_of_memory(folder: Path) -> Iterator[None]:
    """Write a snapshot to ``folder`` if a GPU runs out of memory in the block. No effect without one."""
    torch.cuda.memory._record_memory_history(stacks="python", max_entries=EVENTS)
    try:
        yield
    except torch.OutOfMemoryError:
        folder.mkdir(parents=True, exist_ok=True)
        with replaced(folder / f"out-of-memory-rank-{dist.get_rank()}.pickle") as partial:
            torch.cuda.memory._dump_snapshot(str(partial))
        raise
    finally:
        torch.cuda.memory._record_memory_history(None)
