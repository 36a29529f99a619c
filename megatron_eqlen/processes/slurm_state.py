"""State of a run's SLURM job, if SLURM's commands are on the PATH."""

from __future__ import annotations

import subprocess

PATIENCE = 10.0
"""Seconds in which SLURM must answer."""
GONE = "GONE"
"""State of a job that SLURM no longer knows: it ended a while ago (``MinJobAge``), and is not in the
accounting."""
ENDED = {
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "TIMEOUT",
    GONE,
}  # fmt: skip
"""States after which a job does not start again."""


def job_state(job: str) -> str | None:
    """Return the state of ``job`` in SLURM's words or ``GONE``; None if SLURM cannot be asked."""
    status, said = _ask("squeue", "--noheader", "--states=all", f"--job={job}", "--format=%T")
    if status == 0 and said.split():
        return said.split()[0]
    if status != 0 and "Invalid job id" not in said:
        return None
    status, said = _ask(
        "sacct", "--noheader", "--parsable2", "--allocations", f"--job={job}", "--format=State"
    )
    return said.split()[0] if status == 0 and said.split() else GONE  # CANCELLED by 1000


def _ask(*command: str) -> tuple[int | None, str]:
    """Return the exit status, None if there was none, and the command's output."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE)
    except (OSError, subprocess.TimeoutExpired):
        return None, ""
    return done.returncode, done.stdout + done.stderr
