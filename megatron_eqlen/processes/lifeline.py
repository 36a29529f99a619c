"""A process that ends when the one that launched it ends, however that ends: returned, raised, or killed -9.

A parent names itself in its children's environment (``named``); each child calls ``die_with_launcher`` first.
torchrun starts its ranks in sessions of their own, where SLURM may lose sight of them: they watch it, too.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
import threading
import time

from megatron_eqlen.processes.scratch import note_shared_memory

LAUNCHER = "EQLEN_LAUNCHED"
"""Environment variable: the process id of the launcher."""
TORCHRUN = "TORCHELASTIC_RUN_ID"
"""Set by torchrun for its ranks."""
INTERVAL = 0.25
"""Seconds between two looks. The kernel's own signal (``PR_SET_PDEATHSIG``) would come when the launcher's
*thread* ends, which is not always its process."""

LOOKS_A_NOTE = 40
"""Looks between two notes of the shared memory that the process maps."""


def named() -> dict[str, str]:
    """What a child's environment needs so that the child dies with this process."""
    return {LAUNCHER: str(os.getpid())}


def die_with_launcher() -> None:
    """Watch the launcher that the environment names, or torchrun, if there is one, from a thread; kill this
    process when it is gone. Processes that this one starts find this one in their environment."""
    parent = os.getppid()
    if LAUNCHER not in os.environ and TORCHRUN not in os.environ:
        return
    if os.environ.get(LAUNCHER, str(parent)) != str(parent):
        sys.exit("the launcher is gone")
    os.environ.update(named())
    threading.Thread(target=_watch, args=(parent,), daemon=True, name="lifeline").start()


def _watch(launcher: int) -> None:
    looks = itertools.count()
    while os.getppid() == launcher:  # an orphan gets another parent
        if next(looks) % LOOKS_A_NOTE == 0:
            note_shared_memory()
        time.sleep(INTERVAL)
    os.kill(os.getpid(), signal.SIGKILL)
