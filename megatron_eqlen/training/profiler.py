"""Traces of a run's steps by PyTorch's profiler, of every rank: ``profile/step-00000003-rank-0.json.gz``.

They are in Chrome's format (perfetto.dev, chrome://tracing) and name the stages; so do NVTX ranges on a GPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

from megatron_eqlen.files import step_name
from megatron_eqlen.recipe import ProfileRecipe


class Profiler:
    """Of this rank; ``folder`` is the run's ``profile/``."""

    def __init__(self, folder: Path, recipe: ProfileRecipe) -> None:
        self._folder, self._recipe = folder, recipe
        self._profile: profile | None = None

    def begin(self, step: int) -> None:
        """Before step ``step``, counted from 1."""
        if step not in self._recipe.steps or self._profile is not None:
            return
        gpu = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
        self._profile = profile(
            activities=[ProfilerActivity.CPU, *gpu], profile_memory=self._recipe.memory, acc_events=True
        )
        self._profile.start()

    def end(self, step: int) -> None:
        """After it: write the trace, if this was one of the recipe's steps."""
        if self._profile is None or step not in self._recipe.steps:
            return
        self._profile.stop()
        self._folder.mkdir(parents=True, exist_ok=True)
        name = f"{step_name(step)}-rank-{dist.get_rank()}.json.gz"
        self._profile.export_chrome_trace(str(self._folder / name))
        self._profile = None


@contextlib.contextmanager
def marked(stage: str) -> Iterator[None]:
    """What runs inside is ``stage`` in traces."""
    with record_function(f"stage {stage}"):
        if not torch.cuda.is_available():
            yield
            return
        with torch.cuda.nvtx.range(f"stage {stage}"):
            yield
