"""The display of a run on the screen.

One short line a step, one each for evaluations and notices.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path

from rich.console import Console

from megatron_eqlen.metrics import spent
from megatron_eqlen.recipe.budget import Budget, Spent
from megatron_eqlen.report.format import SHOWN, compact, duration, first_of
from megatron_eqlen.types import Metrics

STEPS_FOR_ETA = 10


class Progress:
    """The display of a run of ``budget``; ``show=False`` is silent. ``note`` gets the warnings, too."""

    def __init__(
        self,
        budget: Budget,
        title: str,
        show: bool = True,
        console: Console | None = None,
        note: Callable[..., None] = lambda kind, **fields: None,
    ) -> None:
        self.budget = budget
        self.title = title
        self.show = show
        self.console = console or Console(highlight=False, soft_wrap=True)
        self.spent = Spent()
        self.metrics: Metrics = {}
        # the newest steps tell the time left: earlier ones may have had other lengths
        self.step_seconds: deque[float] = deque(maxlen=STEPS_FOR_ETA)
        self.started = time.monotonic()
        self._note = note

    def resume(self, spent: Spent) -> None:
        """Show that the run begins (``spent`` of 0 steps) or resumes."""
        self.spent = spent
        if spent.steps:
            self.say(f"resumes after {self.budget.outcome(spent)}")

    def step(self, number: int, metrics: Metrics) -> None:
        """Show that step ``number`` (from 1) is done; ``metrics`` are its own, ``time/step`` in seconds."""
        self.spent, self.metrics = spent(number, metrics), metrics
        if "time/step" in metrics:
            self.step_seconds.append(metrics["time/step"])
        self.say(self._line())

    def say(self, text: str) -> None:
        """Print one line that stays."""
        if self.show:
            self.console.print(text, markup=False)
            self.console.file.flush()

    def warn(self, text: str) -> None:
        """Print a warning that stays, and note it."""
        self._note("warning", text=text)
        self.say(f"WARNING: {text}")

    def finish(self, page: Path, learned: str = "") -> None:
        """Print the last line: the limit that ended the run, accuracies ``learned``, the report's path."""
        taken = duration(time.monotonic() - self.started)
        parts = self.budget.outcome(self.spent), learned, f"{taken} since the start"
        self.say(f"{self.title}: {', '.join(filter(None, parts))}; see {page}")

    def _line(self) -> str:
        of = "" if self.budget.steps is None else f"/{self.budget.steps}"
        seconds = f"{self.step_seconds[-1]:.1f} s" if self.step_seconds else ""
        left = self.budget.seconds_left(self.spent, self.step_seconds)  # by the mean of the newest steps
        ends = "" if left is None else f"{duration(left)} left"
        return "  ".join(filter(None, (f"step {self.spent.steps}{of}", numbers(self.metrics), seconds, ends)))


def numbers(metrics: Mapping[str, float | None]) -> str:
    """Format a step's numbers as ``SHOWN`` says."""
    values = {label: (first_of(metrics, names), unit) for label, (names, unit) in SHOWN.items()}
    texts = [f"{name} {compact(value)}{unit}" for name, (value, unit) in values.items() if value is not None]
    if values["rollout"][0] == 0.0:  # a resumed step whose rollouts were all recorded before
        texts = ["rollout recorded" if text.startswith("rollout ") else text for text in texts]
    return "  ".join(texts)
