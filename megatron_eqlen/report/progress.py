"""The display of a run on the screen: on a terminal two lines that redraw themselves (bar, step and stage,
then the newest numbers), in a log one short line a step. Evaluations and notices stay above, one line
each."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from megatron_eqlen.metrics import spent
from megatron_eqlen.recipe.budget import Budget, Spent
from megatron_eqlen.report.format import REWARD, SHOWN, compact, duration, first_of
from megatron_eqlen.types import Metrics

STEPS_FOR_ETA = 10
SPARKS = "▁▂▃▄▅▆▇█"
SPARK_STEPS = 24


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
        self.rewards: deque[float] = deque(maxlen=SPARK_STEPS)
        self.step_seconds: deque[float] = deque(maxlen=STEPS_FOR_ETA)
        self.started = self.stage_started = time.monotonic()
        self.stage_name = "starting"
        self.live: Live | None = None
        self._note = note

    @property
    def redraws(self) -> bool:
        """True if there is a terminal that can redraw lines."""
        return self.show and self.console.is_terminal and not self.console.is_dumb_terminal

    def resume(self, spent: Spent) -> None:
        """Show that the run begins (``spent`` of 0 steps) or resumes."""
        self.spent = spent
        self._draw()
        if spent.steps:
            self.say(f"resumes after {self.budget.outcome(spent)}")

    def stage(self, name: str) -> None:
        """Show the current stage, for example ``harvest``."""
        self.stage_name, self.stage_started = name, time.monotonic()
        self._draw()

    def step(self, number: int, metrics: Metrics) -> None:
        """Show that step ``number`` (from 1) is done; ``metrics`` are its own, ``time/step`` in seconds."""
        self.spent, self.metrics = spent(number, metrics), metrics
        if "time/step" in metrics:
            self.step_seconds.append(metrics["time/step"])
        if (reward := first_of(metrics, REWARD)) is not None:
            self.rewards.append(reward)
        if self.redraws:
            self._draw()
        else:
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
        """Print the last line: the limit that ended the run, accuracies (``learned``) and the page's path."""
        self.close()
        taken = duration(time.monotonic() - self.started)
        came = self.budget.outcome(self.spent)
        parts = [came, *filter(None, [learned]), f"{taken} since the start"]
        self.say(f"{self.title}: {', '.join(parts)}; see {page}")

    def close(self) -> None:
        """Give the terminal back; safe to call at any time and more than once."""
        if self.live is not None:
            live, self.live = self.live, None
            live.stop()

    # ---- drawing ------------------------------------------------------------------------------------

    def __rich__(self) -> RenderableType:
        bar, left = Table.grid(padding=(0, 2)), self.budget.steps_left(self.spent)
        bar.add_row(
            Text(self.title, "bold"),
            ProgressBar(None if left is None else self.spent.steps + left, self.spent.steps, width=30),
            self._count(),
            Text(f"{self.stage_name} {duration(time.monotonic() - self.stage_started)}", "cyan"),
            self._left(),
        )
        return Group(bar, Text(self._numbers(), no_wrap=True, overflow="ellipsis"))

    def _count(self) -> str:
        done = str(self.spent.steps)
        return f"{done}/{self.budget.steps}" if self.budget.steps is not None else done

    def _draw(self) -> None:
        if not self.redraws:
            return
        if self.live is None:
            self.live = Live(self, console=self.console, refresh_per_second=2)
            self.live.start()
        else:
            self.live.refresh()

    def _line(self) -> str:
        seconds = f"{self.step_seconds[-1]:.1f} s" if self.step_seconds else ""
        parts = (f"step {self._count()}", self._numbers(), seconds, self._left())
        return "  ".join(filter(None, parts))

    def _left(self) -> str:
        left = self.budget.seconds_left(self.spent, self.step_seconds)  # by the mean of the newest steps
        return "" if left is None else f"{duration(left)} left"

    def _numbers(self) -> str:
        return numbers(self.metrics, self.rewards if self.redraws else ())


def numbers(metrics: Mapping[str, float | None], rewards: Collection[float]) -> str:
    """Format a step's numbers as ``SHOWN`` says, with a sparkline of the newest ``rewards``."""
    values = {label: (first_of(metrics, names), unit) for label, (names, unit) in SHOWN.items()}
    texts = [f"{name} {compact(value)}{unit}" for name, (value, unit) in values.items() if value is not None]
    if values["rollout"][0] == 0.0:  # a resumed step whose rollouts were all recorded before
        texts = ["rollout recorded" if text.startswith("rollout ") else text for text in texts]
    if len(rewards) > 1:
        texts.insert(1, sparkline(rewards))
    return "  ".join(texts)


def sparkline(values: Iterable[float]) -> str:
    """Return one character a value, the lowest ``▁`` and the highest ``█``."""
    values = list(values)
    low, high = min(values), max(values)
    scale = (len(SPARKS) - 1) / (high - low) if high > low else 0.0
    return "".join(SPARKS[round((value - low) * scale)] for value in values)
