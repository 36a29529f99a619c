"""Processes as the kernel knows them: ancestry, and which are running."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

PR_SET_NAME, PR_SET_CHILD_SUBREAPER = 15, 36


def adopt_orphans() -> None:
    """From now on make processes whose parent dies children of this process instead of init's."""
    assert ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0


def name(text: str) -> None:
    """Name this process, and what it forks, for ``described``. The kernel keeps 15 bytes."""
    ctypes.CDLL(None).prctl(PR_SET_NAME, text.encode(), 0, 0, 0)


def running() -> dict[int, int]:
    """Return process id -> parent's id of all running processes, zombies excluded."""
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
    """Return running children, their children, and so on."""
    parents, found = running(), {pid}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {pid}


def command_line(pid: int) -> str:
    """Return the command line; empty if the process is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return ""


def described(pid: int) -> str:
    """Return the command line after the process's name; empty if the process is gone."""
    with suppress(FileNotFoundError, ProcessLookupError):
        if line := command_line(pid):
            return f"{Path(f'/proc/{pid}/comm').read_text().strip()}: {line}"
    return ""


def are_gone(pids: Iterable[int]) -> Callable[[], bool]:
    return lambda: not set(pids) & running().keys()


def within(seconds: float, happened: Callable[[], bool], every: float = 0.05) -> bool:
    """Return True if ``happened`` comes true in time; asked ``every`` so many seconds."""
    deadline = time.monotonic() + seconds
    while not happened():
        if time.monotonic() > deadline:
            return False
        time.sleep(every)
    return True
