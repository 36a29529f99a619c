"""Helper process of a rank: has the rank's stacks written if none of its threads can run Python.

    python -IS bystander.py RANK STACKS SECONDS KILLS
        RANK: process id of the rank, the parent of this process
        STACKS: the rank's file, which its watchdog touches
        KILLS: 1 to kill the rank, which no other rank watches

If STACKS is untouched for SECONDS after its deadline, signal DUMP makes faulthandler write the stacks of all
threads into it, for which it needs no lock of Python's. With KILLS the rank is killed SECONDS later. A rank
that can run again removes the stacks at its next look.

faulthandler's own timer is unusable: its clock runs while the rank is stopped (Ctrl-Z), so it would read the
frames of threads that run again, and crash the process. Here time is counted in looks that find the rank not
stopped; this process may be stopped, too.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from pathlib import Path

DUMP = signal.SIGRTMIN + 10
"""Signal that asks a rank for its stacks. Real-time signals have no other use here."""
INTERVAL = 0.25
"""Seconds between two looks."""
HEADER = "Timeout"
"""Start of a file of stacks that this process has asked for."""


def has_stacks(path: str | os.PathLike[str]) -> bool:
    """Return True if the file exists and holds stacks that this process has asked for."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read(len(HEADER)) == HEADER
    except FileNotFoundError:
        return False


def is_stopped(process: int) -> bool:
    """Return True if the process is stopped: by Ctrl-Z, SIGSTOP or a debugger."""
    return Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] in "Tt"


def main(process: str, stacks: str, seconds: str, kills: str) -> None:
    rank, late, touched = int(process), 0, 0
    while os.getppid() == rank:  # an orphan has another parent
        time.sleep(INTERVAL)
        try:
            state, stopped = os.stat(stacks), is_stopped(rank)
        except (FileNotFoundError, ProcessLookupError):  # the rank ends
            late = 0
            continue
        idle = state.st_ctime_ns == touched and state.st_mtime < time.time() and not stopped
        late, touched = late + 1 if idle else 0, state.st_ctime_ns
        if late * INTERVAL <= float(seconds):
            continue
        if not state.st_size:
            Path(stacks).write_text(f"{HEADER}: no thread could run Python\n\n", encoding="utf-8")
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank, DUMP)
        elif kills == "1" and has_stacks(stacks):
            cause = "no thread of rank 0 could run Python: C code kept its lock"
            print(f"eqlen: {cause}; see {stacks}", file=sys.stderr, flush=True)
            try:
                sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # not there with -I
                from megatron_eqlen.processes import events

                events.append(Path(stacks).parents[2], "hang", file=stacks, text=cause)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(rank, signal.SIGKILL)
            return


if __name__ == "__main__":
    main(*sys.argv[1:])
