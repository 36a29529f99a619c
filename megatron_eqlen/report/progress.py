"""What a run shows while it works: a live display on a terminal, one short line a step elsewhere."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as Display

from megatron_eqlen.types import Metrics

SHOWN = (
    ("objective/reward_mean", "reward", "{:.3f}"),
    ("harvest/pairs_per_stream", "pairs", "{:.1f}"),
    ("loss/entropy", "entropy", "{:.2f}"),
    ("loss/mismatch_kl", "mismatch", "{:.1e}"),
    ("harvest/tokens_per_second", "rollout", "{:,.0f} tok/s"),
    ("train/tokens_per_second", "train", "{:,.0f} tok/s"),
    ("time/step", "step", "{:.1f} s"),
)
"""Metric, its short name, and its format; a step without one leaves it out."""


class Progress:
    """The display of one run of ``total`` steps. With ``show=False`` (ranks other than 0) all calls do nothing."""

    def __init__(self, total: int, title: str, show: bool = True, console: Console | None = None) -> None:
        self._total = total
        self._show = show
        self._console = console or Console()
        self._live = show and self._console.is_terminal
        self._numbers = ""
        self._accuracy = ""
        self._display = Display(
            SpinnerColumn(),
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            TextColumn("[cyan]{task.fields[stage]:<10}"),
            TextColumn("{task.fields[numbers]}"),
            console=self._console,
            disable=not self._live,
        )
        self._task = self._display.add_task(title, total=total, stage="start", numbers="")
        self._title = title
        self._display.start()

    def resume(self, step: int) -> None:
        """``step`` steps were taken before; the estimate of what is left starts here."""
        self._display.reset(self._task, total=self._total, completed=step)
        if self._show and step:
            self._console.print(f"{self._title}: resumes after step {step} of {self._total}")

    def stage(self, name: str) -> None:
        """``name`` starts now."""
        self._display.update(self._task, stage=name)

    def step(self, step: int, metrics: Metrics) -> None:
        """``step`` steps are done; ``metrics`` are the last one's."""
        numbers = [f"{name} {text.format(metrics[key])}" for key, name, text in SHOWN if key in metrics]
        line = "  ".join([*numbers, self._accuracy]).rstrip()
        self._display.update(self._task, completed=step, numbers=line)
        if self._show and not self._live:
            self._console.print(f"step {step}/{self._total}  {line}", soft_wrap=True)

    def evaluated(self, label: str, text: str) -> None:
        """An evaluation's outcome, for example ``("before", "arithmetic avg@8 38.1% [33.9, 42.4]")``."""
        self._accuracy = text
        if self._show:
            self._console.print(f"{label}: {text}", soft_wrap=True)

    def finish(self, page: Path) -> None:
        """The run's last word: where to look."""
        self.stage("done")
        self.close()
        if self._show:
            self._console.print(f"report: {page}", soft_wrap=True)

    def close(self) -> None:
        """End the display; calling it again is harmless."""
        self._display.stop()
