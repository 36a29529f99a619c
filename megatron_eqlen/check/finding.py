"""Inputs and results of a check."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

from megatron_eqlen.data.demonstrations import training_prompts
from megatron_eqlen.data.prompts import PromptSource
from megatron_eqlen.environments.load import tools
from megatron_eqlen.hf.turns import require_end
from megatron_eqlen.job import Job
from megatron_eqlen.recipe import Recipe

State = Literal["ok", "slow", "doubt", "missing", "failed"]


@dataclass(frozen=True)
class Place:
    """Machine and run that the checks are about."""

    job: Job | None
    """None: no particular recipe."""
    folder: Path
    """Run folder; need not exist."""
    short: bool
    """Run only quick checks, because every node of a job is waiting."""

    @property
    def recipe(self) -> Recipe | None:
        return self.job and self.job.recipe

    @cached_property
    def prompts(self) -> PromptSource:
        """The recipe's training prompts, read once. Raises ValueError for data that cannot be read."""
        assert self.job is not None
        recipe = self.job.recipe
        require_end(self.job.tokenizer, recipe.data.enable_thinking)
        return training_prompts(recipe, self.job.model.context_length, self.job.tokenizer, tools(recipe))

    @property
    def has_prompts(self) -> bool:
        """True once ``prompts`` are read. Where they cannot be, the check of that name says why."""
        return "prompts" in vars(self)

    @property
    def on_gpus(self) -> bool:
        """True if the recipe asks for GPUs."""
        return self.recipe is not None and self.recipe.cluster.device == "gpu"

    @property
    def processes(self) -> int:
        """Number of the run's processes on this machine."""
        return self.recipe.cluster.processes_per_node if self.recipe else 1


@dataclass(frozen=True)
class Finding:
    state: State
    text: str
    todo: str = ""


@dataclass(frozen=True)
class Check:
    """A line of ``eqlen check``."""

    name: str
    look: Callable[[Place], Finding | None]
    """The check; None: nothing to look at. OSError, ValueError, RuntimeError, SubprocessError: ``failed``."""
    needed: Callable[[Place], bool] = lambda place: True
    """True if a run cannot do without it; else ``missing`` and ``failed`` do not fail the command."""
    in_short: bool = True
    of_inputs: bool = False
    """True if it reads the model: left out where ``inputs`` has said what is wrong with that."""


def gigabytes(size: float) -> str:
    return f"{size / 1e9:.1f} GB" if size < 100e9 else f"{size / 1e9:.0f} GB"
