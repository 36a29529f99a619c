"""The display of a sweep: one line for each method, redrawn on a terminal; in a log, one line an event."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console, RenderableType
from rich.live import Live
from rich.table import Table

from megatron_eqlen.report.format import REWARD, compact, duration, first_of
from megatron_eqlen.report.metrics import read_metrics
from megatron_eqlen.sweep.cells import Cell, Plan

MARKS = {"waiting": "·", "running": "◐", "done": "●", "failed": "✗"}
LAST_LINES = 3
"""Number of last output lines shown of a failed run."""


class Display:
    """Display of the runs of ``plan``."""

    def __init__(self, plan: Plan, console: Console | None = None) -> None:
        self.plan = plan
        self.console = console or Console(highlight=False, soft_wrap=True)
        self.state = {cell.name: "waiting" for cell in plan.cells}
        self.begun = time.monotonic()
        self.fresh = 0
        """Runs that were finished by this command."""
        self.running: Sequence[Cell] = ()
        self.live: Live | None = None

    # ---- events -------------------------------------------------------------------------------------

    def found(self, cell: Cell) -> None:
        self._set(cell, "done", "was complete")

    def started(self, cell: Cell) -> None:
        self._set(cell, "running", "started")

    def ended(self, cell: Cell, taken: str) -> None:
        self.fresh += 1
        self.state[cell.name] = "done"
        self._set(cell, "done", f"ended after {cell.spent().steps} steps, {taken}{self._left()}")

    def failed(self, cell: Cell, status: int, log: Path) -> None:
        self._set(cell, "failed", f"FAILED, status {status}; see {log}")
        for line in log.read_text(errors="replace").splitlines()[-LAST_LINES:] if log.is_file() else ():
            self.say(f"    {line}")

    def skipped(self, cell: Cell) -> None:
        self.say(f"{cell.name} was not started: it may spend what runs of {self.plan.sweep.reference} did")

    def show(self, running: Sequence[Cell]) -> None:
        """Redraw the display on a terminal."""
        self.running = running
        if not self.console.is_terminal or self.console.is_dumb_terminal:
            return
        if self.live is None:
            self.live = Live(self, console=self.console, refresh_per_second=1)
            self.live.start()

    def close(self) -> None:
        if self.live is not None:
            live, self.live = self.live, None
            live.stop()

    def say(self, text: str) -> None:
        """Print one line that stays."""
        self.console.print(text, markup=False)
        self.console.file.flush()

    # ---- drawing ------------------------------------------------------------------------------------

    def _set(self, cell: Cell, state: str, text: str) -> None:
        self.state[cell.name] = state
        self.say(f"[{self._count('done')}/{len(self.state)}] {cell.name} {text}")

    def _count(self, state: str) -> int:
        return [*self.state.values()].count(state)

    def _left(self) -> str:
        """Return the estimated time left, at the pace of the runs that this command has finished; empty after
        the last."""
        waiting = len(self.state) - self._count("done") - self._count("failed")
        seconds = (time.monotonic() - self.begun) / max(self.fresh, 1) * waiting
        return f"; about {duration(seconds)} left" if waiting else ""

    def __rich__(self) -> RenderableType:
        table = Table.grid(padding=(0, 2))
        for group in dict.fromkeys(cell.group for cell in self.plan.cells):
            cells = [cell for cell in self.plan.cells if cell.group == group]
            marks = "".join(MARKS[self.state[cell.name]] for cell in cells)
            now = [_newest(cell) for cell in cells if cell in self.running]
            table.add_row(group, marks, "; ".join(now))
        failed = self._count("failed")
        table.add_row(
            f"{self._count('done')} of {len(self.state)} runs",
            f"{failed} failed" if failed else "",
            duration(time.monotonic() - self.begun),
        )
        return table


def _newest(cell: Cell) -> str:
    records = read_metrics(cell.folder)
    if not records:
        return f"seed {cell.seed}: starting"
    reward = first_of(records[-1], REWARD)
    return f"seed {cell.seed}: step {records[-1]['step']}, reward {compact(reward)}"
