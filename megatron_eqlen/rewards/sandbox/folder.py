"""The empty folder that programs run in, and the sweeping of those whose owners were killed.

A folder is in use while somebody holds its lock; the kernel gives the lock back however its holder ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from pathlib import Path

PREFIX = "eqlen-sandbox-"


class EmptyFolder:
    """A new empty folder, not writable, under a lock that forked processes share. Sweeps abandoned ones."""

    def __init__(self) -> None:
        sweep()
        while True:
            self.path = tempfile.mkdtemp(prefix=PREFIX)
            os.chmod(self.path, 0o555)
            self.lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
            if _lock(self.lock) and os.path.exists(self.path):
                return
            os.close(self.lock)  # another process removed the folder in between

    def unlock(self) -> None:
        os.close(self.lock)

    def remove(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.rmdir(self.path)


def sweep() -> None:
    """Remove the folders that a killed process of this user left behind."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # another user's folder, or removed by another process
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                if os.fstat(descriptor).st_uid == os.getuid() and _lock(descriptor):
                    os.rmdir(folder)
            finally:
                os.close(descriptor)


def _lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
