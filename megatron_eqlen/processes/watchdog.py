"""Detect that a run hangs, record where every rank is, and end the run.

    a rank's progress: stages and beats ─► its deadline: the time stamp of RUN/hang/WHEN/rank-N.txt
    all deadlines have passed ─► stacks into that file ─► status HUNG

A rank that waits for others makes no progress either, so the run hangs only if no rank has made progress for
its time limit. Each rank watches from a thread; ranks communicate only through the run folder. If that
thread cannot run (C code holds Python's lock, or the folder's disk blocks), faulthandler, which needs no
lock, prints the stacks on the screen and ends the rank.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import shutil
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

from megatron_eqlen.processes import events, failures
from megatron_eqlen.processes.lifeline import end_descendants

HANGS, INDEX = "hang", "index.txt"
"""Folder of a run's hangs, and the file of a hang with its message."""
HUNG = 75
"""Exit status of a run that hung: ``EX_TEMPFAIL`` of sysexits.h, to be tried again."""
STUCK = 2.0
"""Multiple of ``seconds`` after which a watching thread that does not run counts as stuck."""

_beats = 0


def beat() -> None:
    """Report progress that may be the only sign of life for long: tokens arrived, a row was computed."""
    global _beats
    _beats += 1


class Watchdog:
    """Watchdog of one rank of ``world``. It records stages from the beginning and watches after ``start``.

    ``seconds`` (``cluster.watchdog_seconds``) is the time limit without progress; None: never watch.
    """

    def __init__(self, rank: int, world: int, seconds: float | None) -> None:
        self.rank, self.world, self.seconds = rank, world, seconds
        self._running: list[tuple[str, float]] = []
        """Name and patience of each running stage."""
        self._seen = -1
        """Beats at the newest look."""
        self._since = time.monotonic()
        """Time of the last progress."""
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    @contextlib.contextmanager
    def stage(self, name: str, patience: float = 0.0) -> Iterator[None]:
        """Mark the block as a stage. ``patience``: the block's own timeout in seconds, added to the limit."""
        beat()
        self._running.append((name, patience))
        try:
            yield
        finally:
            self._running.remove((name, patience))
            beat()

    def start(self, folder: Path) -> None:
        """Start watching. All ranks pass the same ``folder`` (``RUN/hang/WHEN``), of this start alone; its
        parent holds the folders of all starts and is removed with the last of them."""
        if self.seconds is None:
            return
        # Twenty looks within the limit.
        self.interval = min(self.seconds / 20, 30.0)
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._file = open(self._of(self.rank), "a", encoding="utf-8")  # noqa: SIM115 (faulthandler's)
        # Time before the start does not count.
        self._since = time.monotonic()
        self._declare()
        self._postpone()
        self._thread = threading.Thread(target=self._watch, daemon=True, name="watchdog")
        self._thread.start()

    def stop(self) -> None:
        """Stop watching: the rank ends, or has recorded its failure. Never returns while the run hangs, since
        a rank that leaves breaks the others' collectives. Safe to call twice, and before ``start``."""
        self._ended.set()
        if self._thread is None:
            return
        self._thread.join()
        self._thread = None
        faulthandler.cancel_dump_traceback_later()
        self._file.close()
        self._of(self.rank).unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # other ranks, or files of hangs, are still there
            self.folder.rmdir()
            self.folder.parent.rmdir()

    def _watch(self) -> None:
        """Write this rank's deadline; read the others'. Two looks must see a hang: a stopped rank is none."""
        looked, hangs = time.monotonic(), False
        while not self._ended.wait(self.interval):
            self._postpone()
            now = time.monotonic()
            if now - looked > 10 * self.interval:  # this process was stopped, others perhaps, too
                self._since = now
            looked = now
            # A beat since the last look is progress.
            if _beats != self._seen:
                self._seen, self._since = _beats, now
            deadline = self._declare()
            hung = hangs
            # The others are looked at only once this rank's own limit is over.
            hangs = time.time() > deadline and not any(map(self._is_fine, range(self.world)))
            if hung and hangs:
                self._report()

    def _postpone(self) -> None:
        """End the process, with stacks on the screen, if this is not called again in time."""
        assert self.seconds is not None
        faulthandler.dump_traceback_later(STUCK * self.seconds, exit=True)

    def _declare(self) -> float:
        """Set and return the deadline of this rank's next progress, in seconds since 1970."""
        assert self.seconds is not None
        # A copy, since the main thread begins and ends stages.
        patience = max((patience for _, patience in list(self._running)), default=0.0)
        remaining = self.seconds + patience - (time.monotonic() - self._since)
        deadline = time.time() + remaining
        os.utime(self._file.fileno(), (deadline, deadline))
        return deadline

    def _is_fine(self, rank: int) -> bool:
        """Return True if the rank may still be silent. A rank without a file has ended."""
        try:
            return self._of(rank).stat().st_mtime > time.time()
        except FileNotFoundError:
            return False

    def _of(self, rank: int) -> Path:
        return self.folder / f"rank-{rank}.txt"

    def _report(self) -> None:
        try:
            self._write()
        except Exception:  # noqa: BLE001  whatever else is broken, the run ends
            traceback.print_exc()
        end_descendants()
        os._exit(HUNG)

    def _write(self) -> None:
        """Write this rank's stacks; the first rank that does also tells the user."""
        stages = [name for name, _ in list(self._running)]
        where = f"in stage {stages[-1]}" if stages else "between stages"
        silence = f"rank {self.rank} has made no progress for {time.monotonic() - self._since:.0f} s {where}"
        self.folder.mkdir(parents=True, exist_ok=True)  # a later start may have removed it
        self._file.write(f"{silence}\n")
        self._file.flush()
        faulthandler.dump_traceback(self._file, all_threads=True)
        said = f"the run hangs: {silence}, nor has any other rank; stacks of every rank are in {self.folder}"
        # Only the first rank creates the file, and speaks for all.
        with contextlib.suppress(FileExistsError), open(self.folder / INDEX, "x", encoding="utf-8") as index:
            index.write(f"{said}\n")
            with contextlib.suppress(OSError):
                events.append(self.folder.parents[1], HANGS, file=index.name, text=said)
            # ``hidden``: the run folder has the event already.
            if not failures.tell(said, hidden=True, everyone=True):
                print(f"eqlen: {said}", file=sys.stderr, flush=True)
        # wait until all ranks have written their stacks: the launcher ends all when one ends
        deadline, files = time.monotonic() + 4 * self.interval, [*map(self._of, range(self.world))]
        while time.monotonic() < deadline and not all(f.exists() and f.stat().st_size for f in files):
            time.sleep(0.1)


def remove_quiet(folder: Path) -> None:
    """Remove the folders under ``folder`` of killed runs, which hold no stacks of a hang."""
    for hang_folder in filter(Path.is_dir, folder.glob("*")):
        if not any(file.stat().st_size for file in hang_folder.iterdir()):
            shutil.rmtree(hang_folder)
