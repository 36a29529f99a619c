"""PyTorch's profiles of a step on every rank: ``RUN/profile/step-00000003-rank-0.json.gz``, a trace in
Chrome's format (perfetto.dev, chrome://tracing), which names stages."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from megatron_eqlen.files import replaced, step_name
from megatron_eqlen.recipe import ProfileRecipe


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
        self._profile = profile(activities=[ProfilerActivity.CPU, *gpu])
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
