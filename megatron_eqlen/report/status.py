"""``eqlen status RUN``: the state of a run on one screen, from its folder alone.

recipe.yaml, .lock, events.jsonl, metrics.jsonl, evaluation/*.json, checkpoints/latest ──► rows of text
"""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.text import Text

from megatron_eqlen.evaluation.result import evaluation_files, has_all, histories, read_evaluations
from megatron_eqlen.files import LATEST, read_text, step_number, streams_of
from megatron_eqlen.metrics import spent
from megatron_eqlen.processes import hold
from megatron_eqlen.processes.events import BEAT
from megatron_eqlen.processes.run_state import RunState, read_state
from megatron_eqlen.recipe import Recipe
from megatron_eqlen.recipe.contents import is_whole
from megatron_eqlen.recipe.load import load_run
from megatron_eqlen.record.reader import check_newest
from megatron_eqlen.report.diagnosis import STEPS, diagnose
from megatron_eqlen.report.format import compact, duration
from megatron_eqlen.report.metrics import read_newest
from megatron_eqlen.report.progress import STEPS_FOR_ETA, numbers

MOST_WARNINGS = 5
SILENCE = 4 * BEAT
"""Seconds without a sign of life after which a run whose lock is out of sight counts as dead."""

Condition = Literal[
    "not started", "running", "silent", "complete", "stopped",
    "failed", "hung", "given up", "killed", "cancelled",
]  # fmt: skip
"""``silent``: it holds its folder, but gives no sign of life. ``stopped``: ended in order before its limit.
``killed``: it or its machine was cut off. ``given up``: SLURM starts it no more. ``cancelled``: scancel."""
STYLES = {
    "running": "bold green", "complete": "bold green",
    **dict.fromkeys(("silent", "failed", "hung", "given up", "killed"), "bold red"),
}  # fmt: skip
SOURCE_EPOCHS = re.compile(r"data/source/(.*)/epochs")
StatusRow = tuple[str, str | Text]  # name and text


def print_status(folder: Path, console: Console | None = None) -> None:
    """Print one screen about the run in ``folder``. Raises ValueError if it is none or a file is damaged."""
    status = RunStatus(folder)
    check_newest(streams_of(folder))
    console = console or Console(highlight=False, soft_wrap=True)
    recipe = status.recipe
    name = f"{recipe.name} {recipe.method} seed {recipe.seed}"
    console.print(Text.assemble((name, "bold"), "  ", (str(folder), "dim")))
    for name, text in status.screen():
        console.print(Text(f"  {name:<11} ").append(text))


class RunStatus:
    """A run's files as they are now. Raises ValueError as ``print_status``."""

    def __init__(self, folder: Path) -> None:
        self.recipe, self.folder, self.state = load_run(folder), folder, read_state(folder)
        self.holder = hold.read_holder(folder / hold.FILE)
        self.records = read_newest(folder, STEPS)
        self.last: dict[str, Any] = self.records[-1] if self.records else {}
        self.condition: Condition = _condition(folder, self.recipe, self.holder, self.state)
        self.job = _job(self.state) if self.condition != "complete" else ""
        self._latest = folder / "checkpoints" / LATEST

    def screen(self) -> list[StatusRow]:
        now = time.time()
        state = Text(self.condition, STYLES.get(self.condition, "bold yellow")) + Text(self._who(now))
        rows = [("state", state), ("job", self.job), ("progress", self._progress()), ("now", self._now(now))]
        return [(name, text) for name, text in [*rows, *self._history(now)] if text]

    def page(self) -> list[StatusRow]:
        """Return the lines of a page: those that still hold later, with times, not ages, and origins."""
        holder, ended = self.holder, self.condition not in ("running", "silent")
        candidates = [
            *([("state", self.condition), ("job", self.job)] if ended else []),
            ("progress", self._progress()),
            *self._history(),
            ("trained by", hold.named(holder) if holder else ""),
            ("command", holder.get("command", "")),
            ("commit", holder.get("commit", "")),
            ("versions", ", ".join(f"{name} {of}" for name, of in holder.get("versions", {}).items())),
        ]
        return [(name, text) for name, text in candidates if text]

    def _who(self, now: float) -> str:
        """Return who trains it, or did last, and when it gave the newest sign of life."""
        if not self.holder:
            return ""
        seen = f", last sign of life {_ago(self.state.sign_of_life, now)}" if self.state.started else ""
        why = ": it is stopped, or the disk of its folder blocks" if self.condition == "silent" else ""
        return f", {hold.named(self.holder)}{seen}{why}"

    def _progress(self) -> str:
        done = spent(self.last.get("step", 0), self.last)
        seconds = [record["time/step"] for record in self.records[-STEPS_FOR_ETA:] if record.get("time/step")]
        pace = f", {compact(sum(seconds) / len(seconds))} s a step" if seconds else ""
        left = self.recipe.budget.seconds_left(done, seconds) if self.condition == "running" else None
        rest = f", {duration(left)} left" if pace and left is not None else ""
        return f"{self.recipe.budget.outcome(done)}{pace}{rest}"

    def _now(self, now: float) -> str:
        """Return the stages in progress, or those at which a killed run was cut off."""
        if self.condition == "running":
            stages = [f"{stage} for {duration(now - since)}" for since, stage in self.state.stages]
            return ", ".join(stages) or "starting, or between two stages"
        cut_off = self.state.stages if self.condition == "killed" else []
        return ", ".join(f"cut off in {stage}" for _, stage in cut_off)

    def _history(self, now: float | None = None) -> Iterator[StatusRow]:
        """Yield what went wrong and what the run has reached, with ages up to ``now`` or else with times."""
        yield from self._troubles()
        if self.last:
            metrics = {name: value for name, value in self.last.items() if name not in ("step", "time")}
            yield "last step", f"{_ago(self.last['time'], now)}: {numbers(metrics)}"
            yield "data", _position(metrics)
        for _, text in diagnose(self.folder, self.recipe, self.records):
            yield "diagnosis", text
        if now is not None:  # a page has a table of them
            yield from _evaluated(self.folder, self.last.get("step", 0))
        if os.path.lexists(self._latest):
            name, saved = read_text(self._latest).strip(), self._latest.stat().st_mtime
            if step_number(name) is None:
                raise ValueError(f"{self._latest}: expected the name of a checkpoint, found {name!r:.80}")
            there = (self._latest.parent / name).is_dir()
            yield "checkpoint", f"{name}, {_ago(saved, now) if there else 'which is not there'}"
        for at, text in [*self.state.warnings][-MOST_WARNINGS:]:
            yield "warning", f"{time.strftime('%H:%M:%S', time.localtime(at))} {text}"

    def _troubles(self) -> Iterator[StatusRow]:
        state = self.state
        error = state.first_error or (state.end_error if self.condition == "failed" else None) or ""
        text, _, traceback = error.partition("\n")
        yield "error", text
        yield "traceback", traceback
        if state.hangs:
            which = "" if self.condition in ("hung", "given up") else "an earlier try: "
            earlier = f" ({len(state.hangs)} tries hung)" if len(state.hangs) > 1 else ""
            yield "hang", f"{which}{state.hangs[0]}{earlier}"
        count = state.stalled_tries
        stalled = f"{count} in a row {'has' if count == 1 else 'have'} taken no new step" if count else ""
        yield "tries", state.given_up or stalled


def has_ended(run: Path, recipe: Recipe) -> bool:
    """Return True if the run was evaluated after its last step, or, without benchmarks, spent its budget."""
    evaluated = (run / "evaluation/after.json").exists()
    return evaluated or (not recipe.evaluation.benchmarks and _is_spent(run, recipe))


def is_complete(run: Path, recipe: Recipe) -> bool:
    """Return True if nothing of ``recipe`` is left to do in the folder ``run``."""
    return is_trained(run, recipe) and has_all(run / "evaluation/after.json", recipe)


def is_trained(run: Path, recipe: Recipe) -> bool:
    """Return True if the run spent its budget, was evaluated, perhaps in another way, and exported."""
    exports = [run / "export", *([run / "adapter"] if recipe.lora.rank else [])]
    written = (run / "report.html").exists() and all(map(is_whole, exports))
    return written and has_ended(run, recipe) and _is_spent(run, recipe)


def _is_spent(run: Path, recipe: Recipe) -> bool:
    return any(recipe.budget.ended_by(spent(last["step"], last)) for last in read_newest(run, 1))


def _condition(run: Path, recipe: Recipe, holder: dict[str, Any], state: RunState) -> Condition:
    """Return the run's condition. A lock that is held proves that the run is alive; without it, a run on
    another machine is alive if it gave a sign of life a moment ago."""
    here = holder.get("host") == socket.gethostname()
    running = state.started and not state.ended
    heard = running and time.time() - state.sign_of_life < SILENCE
    if hold.is_locked(run / hold.FILE) or (heard and not here):
        if state.hung:
            return "hung"  # the process ends as soon as a disk that does not answer lets it
        return "running" if heard or not running else "silent"
    # it does not run: what it has reached tells more than how one of its tries ended
    if is_complete(run, recipe):
        return "complete"
    if state.given_up:
        return "given up"
    if state.hung:
        return "hung"
    if state.first_error or state.end_error:
        return "failed"
    if state.cancelled:
        return "cancelled"
    if not state.started:
        return "stopped" if holder else "not started"  # its events were lost: nothing says how it ended
    return "stopped" if state.ended else "killed"


def _job(state: RunState) -> str:
    """Return what is known of the newest SLURM job while no try of it trains."""
    if state.cancelled or not state.waits:
        return state.cancelled or ""
    if state.waits == "try":
        return "a SLURM job gets ready: the newest slurm-*.out in the folder says how far it is"
    return f"SLURM job {state.job} has not started: squeue --job {state.job}, later sacct, says why"


def _evaluated(folder: Path, steps: int) -> Iterator[StatusRow]:
    """Yield each benchmark of the first evaluation and of the newest."""
    files = evaluation_files(folder / "evaluation", steps)
    for name, rows in histories(read_evaluations([*files[:1], *files[1:][-1:]])).items():
        results = (f"{row.label} avg@{row.result.samples} {row.result.accuracy}" for row in rows)
        yield name, ", then ".join(results)


def _position(metrics: Mapping[str, float | None]) -> str:
    """Format the data position: ``480 prompts drawn; epochs: math 0.24, code 1.1``."""
    matches = ((SOURCE_EPOCHS.match(name), value) for name, value in metrics.items())
    epochs = [f"{match[1]} {compact(value)}" for match, value in matches if match]
    drawn = metrics.get("data/prompts_drawn")
    parts = [f"{drawn:.0f} prompts drawn"] if drawn is not None else []
    return "; ".join([*parts, *(["epochs: " + ", ".join(epochs)] if epochs else [])])


def _ago(moment: float, now: float | None) -> str:
    """Format an age: ``2:05 ago``, or without ``now`` the date and time."""
    if now is None:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(moment))
    return f"{duration(max(now - moment, 0.0))} ago"
