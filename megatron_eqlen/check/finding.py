"""What a check looks at, and what it can say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megatron_eqlen.recipe import Recipe

State = Literal["ok", "slow", "missing", "failed"]


@dataclass(frozen=True)
class Place:
    """Where a run would be: this machine, and what runs."""

    recipe: Recipe | None
    """None: nothing in particular."""
    folder: Path
    """Of the run; need not exist."""
    short: bool
    """Seconds matter: every node of a job is waiting."""

    @property
    def on_gpus(self) -> bool:
        """Whether GPUs are asked for."""
        return self.recipe is not None and self.recipe.cluster.device == "gpu"

    @property
    def processes(self) -> int:
        """Of the run on this machine."""
        return self.recipe.cluster.processes_per_node if self.recipe else 1


@dataclass(frozen=True)
class Finding:
    state: State
    text: str
    """What was found."""
    todo: str = ""
    """What to do about it."""


@dataclass(frozen=True)
class Check:
    """A line of ``eqlen check``."""

    name: str
    look: Callable[[Place], Finding | None]
    """None: there is nothing to look at here. An OSError, ValueError, RuntimeError or SubprocessError
    counts as ``failed``."""
    needed: Callable[[Place], bool] = lambda place: True
    """Whether a run cannot do without; else ``missing`` and ``failed`` are only said."""
    in_short: bool = True


def gigabytes(size: float) -> str:
    return f"{size / 1e9:.1f} GB" if size < 100e9 else f"{size / 1e9:.0f} GB"
