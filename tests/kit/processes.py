"""Processes as the kernel knows them: who descends from whom, and who is still there."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterable
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """From now on processes whose parent dies become this process's children, not init's."""
    assert ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0


def running() -> dict[int, int]:
    """Process id to parent's of everything that runs; zombies do not."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = path.read_text().rpartition(")")[2].split()[:2]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if state not in "ZX":
            found[int(path.parent.name)] = int(parent)
    return found


def descendants(pid: int) -> set[int]:
    """Children, their children, and so on, that run now."""
    parents, found = running(), {pid}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {pid}


def command_line(pid: int) -> str:
    """Empty if the process is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return ""


def is_stopped(pid: int) -> bool:
    """By SIGSTOP or Ctrl-Z."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def are_gone(pids: Iterable[int]) -> Callable[[], bool]:
    return lambda: not set(pids) & running().keys()


def within(seconds: float, happened: Callable[[], bool], every: float = 0.05) -> bool:
    """Whether it comes true in time; asked ``every`` so many seconds."""
    deadline = time.monotonic() + seconds
    while not happened():
        if time.monotonic() > deadline:
            return False
        time.sleep(every)
    return True
