"""Lock of a run's folder: one process at a time writes to it, wherever that process runs.

A file lock lasts as long as its process. On a cluster this does not suffice: a node that lost the network
keeps running while SLURM restarts the job elsewhere. So the lock file names its holder, a later start of the
same SLURM job takes the lock over, and the holder checks the file before each write.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, TextIO

from megatron_eqlen.files import at_once, expecting, naming, opened, read_json

PATIENCE = 10.0
"""Seconds to wait for the processes of a killed run."""
FILE = ".lock"
HOLDER = ("host", "pid", "time", "slurm_job", "restart")
"""Keys of the holder's record; a run adds others."""


class HeldError(ValueError):
    """Another process holds the folder, or has taken it over from this process."""


class Hold:
    """Lock ``folder/.lock``, with holder and ``about``, until this process ends. Raises HeldError."""

    def __init__(self, folder: Path, about: Mapping[str, Any] = MappingProxyType({})) -> None:
        self.path = folder / FILE
        self._mine = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "time": time.time(),
            "slurm_job": os.environ.get("SLURM_JOB_ID"),
            "restart": int(os.environ.get("SLURM_RESTART_COUNT") or 0),
            **about,
        }
        self._file = self._acquire()
        with naming(self.path):
            # Opened to append: the record of the last holder is still in it.
            self._file.truncate(0)
            self._file.write(json.dumps(self._mine))
            self._file.flush()

    def close(self) -> None:
        """End the lock before this process does."""
        self._file.close()

    def check(self) -> None:
        """Raise HeldError if a later start of this job has taken the folder over, or the lock is gone."""
        if (holder := read_holder(self.path)) != self._mine:
            taken = f"{named(holder)} has taken this run over" if holder else f"{FILE} was removed or emptied"
            raise HeldError(f"{self.path.parent}: {taken}; {named(self._mine)} writes nothing more")

    def _acquire(self) -> TextIO:
        deadline = time.monotonic() + PATIENCE
        while True:
            file = open(self.path, "a", encoding="utf-8", opener=at_once)  # noqa: SIM115 (held until the process ends)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.close()
            else:
                if os.path.samestat(os.fstat(file.fileno()), os.stat(self.path)):
                    return file
                continue  # the file was replaced between our open and our lock
            holder, job = read_holder(self.path), self._mine["slurm_job"]
            again = job is not None and holder.get("slurm_job") == job
            if again and holder["restart"] < self._mine["restart"]:  # SLURM has given up the holder
                self.path.unlink(missing_ok=True)  # which keeps its lock on the deleted file
            elif time.monotonic() > deadline:
                raise HeldError(f"{self.path.parent}: another run is writing here, {named(holder)}") from None
            else:
                time.sleep(0.2)


def is_locked(path: Path) -> bool:
    """Return True if a process is seen to hold the lock file; some file systems show only local locks."""
    try:
        with opened(path) as file:
            # Held for an instant only: processes that want the lock wait longer than that.
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        pass
    return False


def read_holder(path: Path) -> dict[str, Any]:
    """Return the holder's record; empty if it has not been written yet or the file does not exist."""
    try:
        if not path.stat().st_size:
            return {}
    except FileNotFoundError:
        return {}
    holder = read_json(path)
    with expecting("the holder of a run", path):
        if holder:
            # Using the values checks their types before messages are made of them.
            _ = [holder[name] for name in HOLDER], time.localtime(holder["time"]), int(holder["restart"])
            _ = {**holder.get("versions", {})}, *(holder.get(name, "") + "" for name in ("command", "commit"))
        return {**holder}


def named(holder: dict[str, Any]) -> str:
    if not holder:
        return "a process that has not recorded itself yet"
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(holder["time"]))
    job = f" (SLURM job {holder['slurm_job']}, restart {holder['restart']})" if holder["slurm_job"] else ""
    return f"process {holder['pid']} on {holder['host']}{job} since {since}"
