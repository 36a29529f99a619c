"""``eqlen status RUN``: the state of a run on one screen, from its folder alone.

recipe.yaml, .lock, events.jsonl, metrics.jsonl, evaluation/*.json, checkpoints/latest ──► Status
"""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.text import Text

from megatron_eqlen.files import LATEST
from megatron_eqlen.metrics import PROMPTS_DRAWN, TIME_STEP, spent
from megatron_eqlen.processes import hold
from megatron_eqlen.processes.events import BEAT
from megatron_eqlen.recipe import Recipe
from megatron_eqlen.recipe.load import load_run
from megatron_eqlen.report.evaluations import evaluations
from megatron_eqlen.report.format import REWARD, compact, duration, first_of
from megatron_eqlen.report.metrics import read_metrics
from megatron_eqlen.report.progress import SPARK_STEPS, STEPS_FOR_ETA, numbers
from megatron_eqlen.report.run_folder import RunFolder
from megatron_eqlen.report.run_state import Hang, Moment, RunState, read_state
from megatron_eqlen.report.slurm_state import ENDED, GONE, job_state

SILENCE = 4 * BEAT
"""Seconds without a sign of life after which a run on another machine counts as dead, if its lock cannot be
seen."""

Condition = Literal[
    "not started", "running", "silent", "complete", "stopped",
    "failed", "hung", "given up", "killed", "cancelled",
]  # fmt: skip
STYLES = {
    "running": "bold green", "complete": "bold green", "silent": "bold red", "failed": "bold red",
    "hung": "bold red", "given up": "bold red", "killed": "bold red",
}  # fmt: skip
UNEXPLAINED: tuple[Condition, ...] = ("not started", "stopped", "killed")
"""Conditions that the state of the SLURM job replaces."""
FAILED = ENDED - {"CANCELLED", "COMPLETED", GONE}
"""States of a job that failed before it trained."""
SOURCE_EPOCHS = re.compile(r"data/source/(.*)/epochs")
IS_SILENT = "it is stopped, or the disk of its folder blocks"


@dataclass(frozen=True)
class Status:
    """State of a run. Times are seconds since 1970, durations seconds."""

    folder: str
    name: str
    """Name of the recipe, its method and seed."""
    condition: Condition
    """``silent``: it holds its folder, but gives no sign of life. ``stopped``: it ended in order before its
    limit. ``killed``: it was cut off without a word, or its machine is gone. ``given up``: SLURM starts it
    no more. ``cancelled``: SLURM ended its job (scancel) and will not start it again."""
    job: str
    """State of a SLURM job that has not locked the folder yet, or was told to end; else empty."""
    held_by: str
    """Process, host and SLURM job that train it, or did last; empty before the first."""
    command: str
    """Command line of the newest try; empty before the first."""
    commit: str
    """Commit of the repository that it ran from; empty without a repository."""
    versions: dict[str, str]
    """Versions by package."""
    sign_of_life: float | None
    stages: list[Moment]
    """Stages in progress, or at the moment it was cut off."""
    error: str | None
    """The error that ended the newest try, the first of all ranks, in one line."""
    traceback: str
    """Traceback of the error, empty if it has none."""
    hangs: list[Hang]
    """Hangs of all tries, the newest first."""
    given_up: str | None
    stalled_tries: int
    """Number of newest tries in a row of its SLURM job that took no new step."""
    outcome: str
    """``12 of 100 steps``, with other limits and the one that ended the run."""
    steps: int
    """Number of completed steps."""
    steps_limit: int | None
    step_seconds: float | None
    """Mean duration of the newest steps."""
    seconds_left: float | None
    last_step: float | None
    """End of the newest step."""
    rewards: list[float]
    """Rewards of the newest steps."""
    metrics: dict[str, float | None]
    """Metrics of the newest step."""
    evaluations: dict[str, list[str]] = field(default_factory=dict)
    """Benchmark to results: the first, and the newest if there is another."""
    checkpoint: str | None = None
    checkpoint_time: float | None = None
    warnings: list[Moment] = field(default_factory=list)
    """Warnings of the newest start, oldest first."""


def status(folder: Path, state: RunState | None = None) -> Status:
    """Return the status. Raises ValueError if ``folder`` is no run's folder, or naming a file that cannot be
    read. ``state``: see ``read_state``, which is called without it."""
    recipe = load_run(folder)
    files = RunFolder(recipe.model_copy(update={"run_dir": str(folder)}))
    records, state = read_metrics(folder), state or read_state(folder)
    holder = hold.read_holder(folder / hold.FILE)
    condition = _condition(files, recipe, holder, state)
    job, end = _job(folder, state) if condition != "complete" else ("", None)
    error = state.first_error or (state.end_error if condition == "failed" else None)
    last = records[-1] if records else {}
    done = spent(last.get("step", 0), last)
    seconds = [record[TIME_STEP] for record in records[-STEPS_FOR_ETA:] if record.get(TIME_STEP)]
    latest = files.checkpoints / LATEST
    return Status(
        folder=str(folder),
        name=f"{recipe.name} {recipe.method} seed {recipe.seed}",
        condition=end if end and condition in UNEXPLAINED else condition,
        job=job,
        held_by=hold.named(holder) if holder else "",
        command=holder.get("command", ""),
        commit=holder.get("commit", ""),
        versions=holder.get("versions", {}),
        sign_of_life=state.sign_of_life if state.started else None,
        stages=state.stages if condition in ("running", "killed") else [],
        error=error.partition("\n")[0] if error else None,
        traceback=error.partition("\n")[2] if error else "",
        hangs=state.hangs,
        given_up=state.given_up,
        stalled_tries=state.stalled_tries,
        outcome=recipe.budget.outcome(done),
        steps=done.steps,
        steps_limit=recipe.budget.steps,
        step_seconds=sum(seconds) / len(seconds) if seconds else None,
        seconds_left=recipe.budget.seconds_left(done, seconds),
        last_step=last.get("time"),
        rewards=[
            value for record in records[-SPARK_STEPS:] if (value := first_of(record, REWARD)) is not None
        ],
        metrics={name: last[name] for name in last if name not in ("step", "time")},
        evaluations=_evaluated(folder, done.steps),
        checkpoint=latest.read_text(encoding="utf-8").strip() if latest.exists() else None,
        checkpoint_time=latest.stat().st_mtime if latest.exists() else None,
        warnings=[*state.warnings],
    )


def _condition(files: RunFolder, recipe: Recipe, holder: dict[str, Any], state: RunState) -> Condition:
    """Return the run's condition. A lock that is seen to be held proves that the run is alive; otherwise, on
    another machine, a run that gave a sign of life a moment ago counts as alive."""
    here = holder.get("host") == socket.gethostname()
    running = state.started and not state.ended
    heard = running and time.time() - state.sign_of_life < SILENCE
    if hold.is_locked(files.path / hold.FILE) or (heard and not here):
        if state.hung:
            return "hung"  # the process ends as soon as a disk that does not answer lets it
        return "running" if heard or not running else "silent"
    if files.ended(recipe):
        return "complete"
    if state.given_up:
        return "given up"
    if state.hung:
        return "hung"
    if state.first_error or state.end_error:
        return "failed"
    if not state.started:
        return "not started"
    return "stopped" if state.ended else "killed"


def _job(folder: Path, state: RunState) -> tuple[str, Condition | None]:
    """Return the state of the newest SLURM job while no try of it trains, and the condition that follows."""
    job, cancelled = state.job, state.cancelled
    if job is None or not (state.waits or cancelled):
        return cancelled or "", "cancelled" if cancelled else None
    now = job_state(job)
    if now in ENDED:
        how = "SLURM no longer knows it" if now == GONE else now
        why = cancelled or f"see {folder}/slurm-{job}.out, if there is one"
        text = f"SLURM job {job} has ended: {how}; {why}"
        if now == "CANCELLED" or (now == GONE and cancelled):
            return text, "cancelled"
        return text, "failed" if now in FAILED else None
    if now is None and cancelled:
        return cancelled, "cancelled"
    if now != "PENDING" and (now or state.waits == "try"):
        return "a SLURM job gets ready: the newest slurm-*.out in the folder says how far it is", None
    return f"SLURM job {job} has not started: squeue --job {job} says why", None


def _evaluated(folder: Path, steps: int) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for label, _, results in evaluations(folder / "evaluation", steps):
        for result in results:
            text = f"{label} avg@{result.samples} {result.accuracy}"
            found.setdefault(result.benchmark, []).append(text)
    return {name: [texts[0], *texts[1:][-1:]] for name, texts in found.items()}


# ---- on the screen --------------------------------------------------------------------------------------


def print_status(folder: Path, as_json: bool = False, console: Console | None = None) -> None:
    """Print one screen of text, or everything as JSON."""
    found = status(folder)
    if as_json:
        print(json.dumps(asdict(found), indent=1))
        return
    console = console or Console(highlight=False, soft_wrap=True)
    console.print(Text.assemble((found.name, "bold"), "  ", (found.folder, "dim")))
    for name, text in screen_rows(found):
        console.print(Text(f"  {name:<11} ").append(text))


def page_rows(found: Status) -> list[tuple[str, str]]:
    """Return the rows of the page's card: those of the screen, and the origin of the run. A page has times
    instead of ages, and leaves out rows that hold only while the run trains."""
    passing = {"state", "job", "now"} if found.condition in ("running", "silent") else set()
    rows = [(name, str(text)) for name, text in screen_rows(found, ages=False) if name not in passing]
    origin = {
        "trained by": found.held_by,
        "command": found.command,
        "commit": found.commit,
        "versions": ", ".join(f"{name} {version}" for name, version in found.versions.items()),
    }
    return [*rows, *((name, text) for name, text in origin.items() if text)]


def screen_rows(found: Status, ages: bool = True) -> list[tuple[str, str | Text]]:
    """Return each line's name and text. Without ``ages`` the times of events are absolute."""
    now = time.time() if ages else None
    rows: list[tuple[str, str | Text | None]] = [
        ("state", Text(found.condition, STYLES.get(found.condition, "bold yellow")) + Text(_who(found, now))),
        ("job", found.job),
        ("progress", f"{found.outcome}{_pace(found)}"),
        ("now", _under_way(found, now or time.time())),
        ("error", found.error),
        ("traceback", f"eqlen status {found.folder} --json" if found.traceback else ""),
        ("hang", _hung(found)),
        ("tries", found.given_up or _stalled(found)),
        ("last step", _numbers(found, now)),
        ("data", _position(found)),
        *((name, ", then ".join(texts)) for name, texts in found.evaluations.items()),
        ("checkpoint", found.checkpoint and f"{found.checkpoint}, {_ago(found.checkpoint_time, now)}"),
        *(("warning", text) for text in _warned(found)),
    ]
    return [(name, text) for name, text in rows if text]


def _who(found: Status, now: float | None) -> str:
    if not found.held_by:
        return ""
    seen = f", last sign of life {_ago(found.sign_of_life, now)}" if found.sign_of_life else ""
    why = f": {IS_SILENT}" if found.condition == "silent" else ""
    return f", {found.held_by}{seen}{why}"


def _hung(found: Status) -> str:
    if not found.hangs:
        return ""
    which = "" if found.condition in ("hung", "given up") else "an earlier try: "
    earlier = f" ({len(found.hangs)} tries hung)" if len(found.hangs) > 1 else ""
    return f"{which}{found.hangs[0].cause}; see {found.hangs[0].file}{earlier}"


def _stalled(found: Status) -> str:
    count = found.stalled_tries
    return f"{count} in a row {'has' if count == 1 else 'have'} taken no new step" if count else ""


def _position(found: Status) -> str:
    """Format the data position: ``480 prompts drawn; epochs: math 0.24, code 1.1``."""
    epochs = [
        f"{named[1]} {compact(value)}"
        for name, value in found.metrics.items()
        if (named := SOURCE_EPOCHS.match(name))
    ]
    drawn = found.metrics.get(PROMPTS_DRAWN)
    parts = [f"{drawn:.0f} prompts drawn"] if drawn is not None else []
    return "; ".join([*parts, *(["epochs: " + ", ".join(epochs)] if epochs else [])])


def _pace(found: Status) -> str:
    if found.step_seconds is None:
        return ""
    text = f", {compact(found.step_seconds)} s a step"
    if found.condition != "running" or found.seconds_left is None:
        return text
    return f"{text}, {duration(found.seconds_left)} left"


def _under_way(found: Status, now: float) -> str:
    """Return the stages in progress, or those at which a killed run was cut off."""
    if found.condition == "running":
        stages = [f"{stage} for {duration(now - since)}" for since, stage in found.stages]
        return ", ".join(stages) or "starting, or between two stages"
    return ", ".join(f"cut off in {stage}" for _, stage in found.stages)


def _numbers(found: Status, now: float | None) -> str:
    if not found.metrics:
        return ""
    return f"{_ago(found.last_step, now)}: {numbers(found.metrics, found.rewards)}"


def _warned(found: Status, most: int = 5) -> Sequence[str]:
    return [f"{time.strftime('%H:%M:%S', time.localtime(at))} {text}" for at, text in found.warnings[-most:]]


def _ago(moment: float | None, now: float | None) -> str:
    """Format an age: ``2:05 ago``, or without ``now`` the date and time."""
    if moment is None:
        return ""
    if now is None:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(moment))
    return f"{duration(max(now - moment, 0.0))} ago"
