"""Helper process of a single-rank run: kills the rank if none of its threads can run Python.

    python -IS bystander.py RANK STACKS SECONDS    kills process RANK, its parent, once STACKS has held stacks
                                                   for SECONDS

faulthandler writes the stacks and could end the rank itself, but its clock runs while the rank is stopped
(Ctrl-Z): it would kill a rank that was just continued. The rank removes its stacks at its next look. Time is
counted in looks, since this process may be stopped, too. With several ranks, the ranks watch each other.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from pathlib import Path

INTERVAL = 0.25
"""Seconds between two looks."""


def has_stacks(path: str | os.PathLike[str]) -> bool:
    """Return True if the file exists and holds faulthandler's output."""
    try:
        with open(path, "rb") as file:
            return file.read(7) == b"Timeout"
    except FileNotFoundError:
        return False


def main(process: str, stacks: str, seconds: str) -> None:
    rank, late = int(process), 0
    while os.getppid() == rank:  # an orphan has another parent
        time.sleep(INTERVAL)
        late = late + 1 if has_stacks(stacks) else 0
        if late * INTERVAL > float(seconds):
            cause = "no thread of rank 0 could run Python: C code kept its lock"
            print(f"eqlen: {cause}; see {stacks}", file=sys.stderr, flush=True)
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank, signal.SIGKILL)
            sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # not there with -I
            from megatron_eqlen.processes import events

            events.append(Path(stacks).parents[2], "hang", file=stacks, text=cause)
            return


if __name__ == "__main__":
    main(*sys.argv[1:])
