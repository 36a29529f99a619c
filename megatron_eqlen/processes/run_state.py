"""State of a run: the fold of its events (``processes/events.py``)."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from megatron_eqlen.files import expecting
from megatron_eqlen.processes import events
from megatron_eqlen.processes.events import Event
from megatron_eqlen.processes.failures import free_space

WARNINGS = 20
"""Number of newest warnings that the state has."""
NEWEST = 1 << 18
"""Bytes at the record's end in which steps and stages, most of its events, are read."""
TICK = 0.1
"""Seconds by which the time of a file may lie before the clock: it is that of the kernel's last tick."""

Moment = tuple[float, str]
"""Seconds since 1970, and a stage that began or a warning that was given then."""


@dataclass
class RunState:
    """State after the events so far. A `try` is a start of the batch script, a `start` one of the run."""

    job: str | None = None
    """Newest SLURM job that was submitted."""
    waits: Literal["submitted", "try"] | None = None
    """Newer than the newest start: a job that was submitted, or its try that gets ready."""
    started: bool = False
    began: float = 0.0
    """Begin of the newest try or start, in seconds since 1970."""
    stages: list[Moment] = field(default_factory=list)
    """Stages in progress, or at the moment the run was cut off."""
    saved: int | None = None
    """Number of steps after which the newest checkpoint was saved."""
    warnings: deque[Moment] = field(default_factory=lambda: deque(maxlen=WARNINGS))
    """Newest warnings of the newest start, oldest first."""
    ended: bool = False
    """True if the newest start ended in order, whether the run is complete or not."""
    end_error: str | None = None
    """The error that ended the newest start in order, if one did."""
    first_error: str | None = None
    """The first error of any rank of the newest try, with its traceback."""
    hangs: list[str] = field(default_factory=list)
    """Cause of each try's hang, and the file to read first; the newest first."""
    hung: bool = False
    stalled_tries: int = 0
    given_up: str | None = None
    cancelled: str | None = None
    """Notice that SLURM told the newest try to end."""
    sign_of_life: float = 0.0
    """Time of the newest event, or of the newest sign of life without one."""

    def take(self, event: Event) -> None:
        """Change the state as the event says. Unknown kinds, of a later version, change nothing."""
        # The newest of job, try and start decides what the state is about: it clears what is older.
        time, text = event["time"], event.get("text")
        match event["kind"]:
            case "submitted":
                self.job, self.waits, self.cancelled = event["job"], "submitted", None
            case "try":
                self.waits, self.began = "try", time
                self.first_error = self.given_up = self.cancelled = None
            case "started":
                self.started, self.waits, self.began = True, None, time
                self.ended = self.hung = False
                self.first_error = self.given_up = self.cancelled = self.end_error = None
                # Stages that the earlier start was in when it was cut off.
                self.stages = []
                self.warnings.clear()
            # The end of a stage carries its begin.
            case "stage" if "began" in event:
                self.stages = [stage for stage in self.stages if stage != (event["began"], event["stage"])]
            case "stage":
                self.stages.append((time, event["stage"]))
            # Progress: the next failure is the first of a new count.
            case "step":
                self.stalled_tries = 0
            case "saved":
                self.saved = event["step"]
            case "warning":
                self.warnings.append((time, event["text"]))
            case "error":
                self.first_error = self.first_error or event["text"]
            case "hang":
                self.hangs.insert(0, f"{event['text']}; see {event['file']}")
                self.hung = True
            case "requeued":
                self.stalled_tries = event["stalled"]
            case "given_up":
                self.given_up, self.stalled_tries = event["text"], 0
            case "cancelled":
                self.cancelled = text
            case "ended":
                self.ended, self.end_error = True, event["error"]


def read_state(run: Path) -> RunState:
    state, file, lost = RunState(), run / events.FILE, run / events.LOST
    with expecting("an event", file):
        for event in events.read(run, NEWEST):
            state.take(event)
    # A run that has nothing to say touches the file (``EventWriter``).
    if file.exists():
        state.sign_of_life = file.stat().st_mtime
    # The mark of an event that the disk had no room for, if it is of this try.
    if not state.first_error and lost.exists() and lost.stat().st_mtime >= state.began - TICK:
        state.first_error = (
            f"an error that could not be written down, as on a full disk ({free_space(run)} now); "
            "the last lines of the run's output say it"
        )
    return state
