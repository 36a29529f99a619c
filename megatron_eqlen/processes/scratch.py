"""Folder under TMPDIR for temporary files of a process and its children; later starts remove stale folders.

    $TMPDIR/eqlen-tmp-XXXXXXXX/      locked by its owner for its lifetime; TMPDIR of its children
        shared-memory-PID            segments in /dev/shm that process PID maps (``note_shared_memory``)

A killed process removes nothing: torch's agents leave folders, vLLM's servers sockets and shared memory.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import os
import re
import shutil
import tempfile
from pathlib import Path

SCRATCH = "EQLEN_SCRATCH"
"""Environment variable: the folder, which children share with the process that made it."""
PREFIX, NOTES = "eqlen-tmp-", "shared-memory-"
LONGEST = 50
"""Maximum bytes of TMPDIR: a socket's path has 107, of which this folder and vLLM's names take 56."""
SHORT = "/tmp"
SEGMENT = re.compile(r" (/dev/shm/[^ \n]+)$", re.MULTILINE)

_lock: int | None = None


def use_scratch() -> None:
    """Create the folder, unless a parent has, and remove the folders whose owners have ended.

    Compiled code keeps its place, for later starts.
    """
    global _lock
    if os.path.isdir(os.environ.get(SCRATCH, "")):
        return
    base = tempfile.gettempdir()
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{base}/torchinductor_{os.getuid()}")
    base = base if len(os.fsencode(base)) <= LONGEST else SHORT
    _sweep(Path(base))
    while _lock is None:
        folder = tempfile.mkdtemp(prefix=PREFIX, dir=base)
        _lock = _locked(Path(folder))  # None: another process swept it already
    os.chmod(folder, 0o711)  # like TMPDIR: open to processes that know a name
    os.environ[SCRATCH] = os.environ["TMPDIR"] = tempfile.tempdir = folder
    atexit.register(_remove_own, os.getpid(), folder)


def note_shared_memory() -> None:
    """Write the shared-memory segments that this process maps, for the sweep after a kill."""
    if (folder := os.environ.get(SCRATCH)) is None:
        return
    mapped = sorted(set(SEGMENT.findall(Path("/proc/self/maps").read_text(encoding="utf-8"))))
    if mapped:
        with contextlib.suppress(OSError):  # the owner has ended, or the disk is full
            Path(folder, f"{NOTES}{os.getpid()}").write_text("\n".join(mapped), encoding="utf-8")


def _remove_own(owner: int, folder: str) -> None:
    if os.getpid() == owner:  # not a fork of the owner
        shutil.rmtree(folder, ignore_errors=True)


def _sweep(base: Path) -> None:
    for folder in base.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # another user's folder, or another process removes it
            if folder.stat().st_uid != os.getuid() or (lock := _locked(folder)) is None:
                continue
            for note in folder.glob(f"{NOTES}*"):
                for segment in note.read_text(encoding="utf-8").splitlines():
                    Path(segment).unlink(missing_ok=True)
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)


def _locked(folder: Path) -> int | None:
    """Lock ``folder`` and return its descriptor; None while another process holds the lock."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    if folder.exists():
        return descriptor
    os.close(descriptor)
    return None
