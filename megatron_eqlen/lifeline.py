"""A process that ends when the one that launched it ends, however that ends: returned, raised, or killed -9.

A parent names itself in its children's environment (``named``); each child calls ``die_with_launcher`` first.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

LAUNCHER = "EQLEN_LAUNCHED"
"""Environment variable: the process id of the launcher."""
INTERVAL = 0.25
"""Seconds between two looks. The kernel's own signal (``PR_SET_PDEATHSIG``) would come when the launcher's
*thread* ends, which is not always its process."""


def named() -> dict[str, str]:
    """What a child's environment needs so that the child dies with this process."""
    return {LAUNCHER: str(os.getpid())}


def die_with_launcher() -> None:
    """Watch the launcher that the environment names, if it names one, from a thread; kill this process when
    it is gone. Processes that this one starts find this one in their environment."""
    launcher = os.environ.get(LAUNCHER)
    if launcher is None:
        return
    if os.getppid() != int(launcher):
        sys.exit("the launcher is gone")
    os.environ.update(named())
    threading.Thread(target=_watch, args=(int(launcher),), daemon=True, name="lifeline").start()


def _watch(launcher: int) -> None:
    while os.getppid() == launcher:  # an orphan gets another parent
        time.sleep(INTERVAL)
    os.kill(os.getpid(), signal.SIGKILL)
