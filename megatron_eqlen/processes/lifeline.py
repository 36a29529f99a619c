"""End a process when its launcher ends, whether the launcher returned, raised, or was killed with SIGKILL.

A parent names itself in its children's environment (``named``); each child calls ``die_with_launcher`` first.
torchrun starts its ranks in separate sessions, which SLURM may lose track of; the ranks watch torchrun, too.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

LAUNCHER = "EQLEN_LAUNCHED"
"""Environment variable: the process id of the launcher."""
TORCHRUN = "TORCHELASTIC_RUN_ID"
"""Environment variable that torchrun sets for its ranks."""
INTERVAL = 0.25
"""Seconds between two looks. The kernel's signal (``PR_SET_PDEATHSIG``) would arrive when the launcher's
*thread* ends, which may be before its process ends."""


def named() -> dict[str, str]:
    """Return the environment variables that make a child end with this process."""
    return {LAUNCHER: str(os.getpid())}


def die_with_launcher() -> None:
    """Kill this process when its launcher ends: a thread watches the launcher that the environment names, or
    torchrun. Child processes find this process in their environment."""
    parent = os.getppid()
    if LAUNCHER not in os.environ and TORCHRUN not in os.environ:
        return
    if os.environ.get(LAUNCHER, str(parent)) != str(parent):
        sys.exit("the launcher is gone")
    os.environ.update(named())
    threading.Thread(target=_watch, args=(parent,), daemon=True, name="lifeline").start()


def _watch(launcher: int) -> None:
    while os.getppid() == launcher:  # an orphan has another parent
        time.sleep(INTERVAL)
    os.kill(os.getpid(), signal.SIGKILL)
