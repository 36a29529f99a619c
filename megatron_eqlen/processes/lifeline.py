"""End a process when its launcher ends, whether that returned, raised, or was killed with SIGKILL; and what
it started itself, such as an environment's programs, when it ends.

A parent names itself in its children's environment (``named``); each child calls ``die_with_launcher`` first.
torchrun starts its ranks in separate sessions, which SLURM may lose track of; the ranks watch torchrun, too.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Set
from contextlib import contextmanager, suppress
from pathlib import Path

LAUNCHER = "EQLEN_LAUNCHED"
"""Environment variable: the process id of the launcher."""
TORCHRUN = "TORCHELASTIC_RUN_ID"
"""Environment variable that torchrun sets for its ranks."""
INTERVAL = 0.25
"""Seconds between two looks. The kernel's ``PR_SET_PDEATHSIG`` comes when the launcher's *thread* ends."""
PR_SET_CHILD_SUBREAPER = 36
PATIENCE = 5.0
"""Seconds in which killed processes end, unless they wait for a broken device."""


def named() -> dict[str, str]:
    """Return the environment variables that make a child end with this process."""
    return {LAUNCHER: str(os.getpid())}


def die_with_launcher() -> None:
    """Kill this process when its launcher ends: a thread watches the launcher that the environment names, or
    torchrun. Child processes find this process in their environment."""
    parent = os.getppid()
    launcher = os.environ.get(LAUNCHER, str(parent if TORCHRUN in os.environ else os.getpid()))
    if launcher == str(os.getpid()):  # called before, a launcher itself, or without one
        return
    # The launcher ended before this call: the process has another parent now.
    if launcher != str(parent):
        sys.exit("the launcher is gone")
    os.environ.update(named())
    threading.Thread(target=_watch, args=(parent,), daemon=True, name="lifeline").start()


def _watch(launcher: int) -> None:
    while os.getppid() == launcher:  # an orphan has another parent
        time.sleep(INTERVAL)
    end_descendants()
    os.kill(os.getpid(), signal.SIGKILL)


@contextmanager
def taking_along() -> Iterator[None]:
    """Kill, after the block, the processes started in it and theirs: orphans become this one's children."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    before = _descendants()
    try:
        yield
    finally:
        end_descendants(before)


def end_descendants(spare: Set[int] = frozenset()) -> None:
    """Kill the descendants of this process except ``spare``."""
    # Look again until none is left: what is killed may have started others meanwhile.
    deadline = time.monotonic() + PATIENCE
    while (left := _descendants() - spare) and time.monotonic() < deadline:
        for pid in left:
            with suppress(OSError):  # it has ended
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def _descendants() -> set[int]:
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            # ``42 (my (odd) name) S 1 …``: the name may hold spaces and brackets, so read from the last.
            state, parent = stat.read_text(errors="replace").rpartition(")")[2].split()[:2]
            # Zombies and the dead need no signal.
            if state not in "ZX":
                parents[int(stat.parent.name)] = int(parent)
    # Children, their children, and so on, until no more are found.
    found = {os.getpid()}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {os.getpid()}
