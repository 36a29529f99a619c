"""Detect that a run hangs, record where every rank is, and end the run.

    a rank's progress: stages, beats, collectives ─► its deadline: the time stamp of RUN/hang/WHEN/rank-N.txt
    all deadlines have passed ─► stacks into that file, facts into rank-N.json, index.txt ─► status HUNG
                                                            RUN/events.jsonl names index.txt ◄─┘

A rank that waits for others makes no progress either, so the run hangs only if no rank has made progress for
its time limit. Each rank watches from a thread; ranks communicate only through the run folder, which a second
thread reads and writes: if its disk blocks, the first thread reports that on the screen. If no thread can run
(C code that holds Python's lock), a helper process (``bystander``) has faulthandler write the stacks.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import threading
import time
import traceback
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from megatron_eqlen.files import write_text
from megatron_eqlen.processes import bystander, events, failures, hang

HUNG = 75
"""Exit status of a run that hung: ``EX_TEMPFAIL`` of sysexits.h, to be tried again."""
FIRST = 3.0
"""Multiple of ``seconds`` that a stage may be silent before a stage of its name has ended, and a rank between
stages: engines start, kernels are compiled, weights are read."""
LONGER = 10.0
"""Multiple of the median of a stage's longest silences that later runs of the stage may take; at least
``seconds`` and at most the first limit, since ranks that wait for others are silent, too."""
REMEMBERED = 50
"""Number of recent silences of a stage in the median."""
STUCK = 10
"""Intervals that the watching threads may miss before they count as stuck. Smaller values are unsafe:
faulthandler crashes a process if it reads the frames of threads that run."""

_beats = 0


def beat() -> None:
    """Report progress that may be the only sign of life for long: tokens arrived, a row was computed."""
    global _beats
    _beats += 1


class Running:
    """A running stage."""

    def __init__(self, name: str, patience: float) -> None:
        self.name, self.patience = name, patience
        self.silence = 0.0
        """Longest silence so far, in seconds."""


class Watchdog:
    """Watchdog of one rank of ``world``. It records stages from the beginning and watches after ``start``.

    ``seconds`` (``cluster.watchdog_seconds``) is the time limit without progress; None: never watch.
    ``collectives`` returns a number or any other value that changes when a collective begins or ends.
    """

    def __init__(
        self, rank: int, world: int, seconds: float | None, collectives: Callable[[], Any] = int
    ) -> None:
        self.rank, self.world, self.seconds = rank, world, seconds
        self._collectives = collectives
        self._facts_sources: list[Callable[[], dict[str, Any]]] = []
        self._running: list[Running] = []
        self._silences: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=REMEMBERED))
        self._seen: Any = None
        self._since = time.monotonic()
        """Time of the last progress."""
        self._ended, self._looked = threading.Event(), threading.Event()
        self._asking: float | None = None
        """Start of the current access to the run folder; None: no access."""
        self._threads: list[threading.Thread] = []
        self._bystander: subprocess.Popen[bytes] | None = None

    @contextlib.contextmanager
    def stage(self, name: str, patience: float = 0.0) -> Iterator[None]:
        """Mark the block as a stage. ``patience``: the block's own timeout in seconds, added to the limit."""
        running = Running(name, patience)
        beat()
        self._running.append(running)
        try:
            yield
        finally:
            self._running.remove(running)
            self._silences[name].append(running.silence)
            beat()

    def add_facts(self, facts: Callable[[], dict[str, Any]]) -> None:
        """Add the result of ``facts`` to this rank's facts of a hang. The watchdog calls ``facts`` during the
        hang, from another thread; ``facts`` must take no lock."""
        self._facts_sources.append(facts)

    def start(self, folder: Path) -> None:
        """Start watching. All ranks pass the same ``folder`` (``RUN/hang/WHEN``), which belongs to this start
        of the run alone; its parent holds the folders of all starts and is removed with the last of them."""
        if self.seconds is None:
            return
        self.interval = min(self.seconds / 20, 30.0)
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._file = open(self._of(self.rank), "a", encoding="utf-8")  # noqa: SIM115 (faulthandler's)
        self._since = time.monotonic()
        self._declare()
        faulthandler.register(bystander.DUMP, file=self._file, all_threads=True)
        arguments = os.getpid(), self._file.name, STUCK * self.interval, int(self.world == 1)
        command = [sys.executable, "-IS", bystander.__file__, *map(str, arguments)]
        self._bystander = subprocess.Popen(command, start_new_session=True)  # not reached by Ctrl-C
        for name, work in (("watchdog", self._watch), ("watchdog-disk", self._check_folder)):
            self._threads.append(threading.Thread(target=work, daemon=True, name=name))
            self._threads[-1].start()

    def stop(self) -> None:
        """Stop watching: the rank ends, or has recorded its failure. Never returns while the run hangs, since
        the first rank that leaves breaks the others' collectives. May be called twice, and before ``start``.
        """
        self._ended.set()
        self._looked.set()
        if not self._threads:
            return
        for thread in self._threads:
            thread.join()
        self._threads.clear()
        faulthandler.unregister(bystander.DUMP)
        self._file.close()
        self._of(self.rank).unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # other ranks, or files of hangs, are still there
            self.folder.rmdir()
            self.folder.parent.rmdir()

    @property
    def limit(self) -> float:
        """Seconds for which this rank may be silent now."""
        assert self.seconds is not None
        running = list(self._running)
        return max([self._limit(stage) for stage in running], default=FIRST * self.seconds)

    def _limit(self, stage: Running) -> float:
        assert self.seconds is not None
        if silences := self._silences[stage.name]:
            longest = LONGER * statistics.median(silences)
            return min(max(longest, self.seconds), FIRST * self.seconds) + stage.patience
        return FIRST * self.seconds + stage.patience

    # ---- threads ------------------------------------------------------------------------------------

    def _watch(self) -> None:
        looked = time.monotonic()
        while not self._ended.wait(self.interval):
            now = time.monotonic()
            if now - looked > 10 * self.interval:  # this process was stopped, others perhaps, too
                self._since = now
            looked = now
            self._update(now)
            asking = self._asking
            if asking is None:
                self._looked.set()
            elif min(now - asking, now - self._since - self.limit) > STUCK * self.interval:
                self._report_disk(now - asking)

    def _check_folder(self) -> None:
        """Write this rank's deadline and read the others' after each look. A hang is reported only if two
        looks in a row see it: a process may be stopped between the two while the clock runs."""
        hangs = False
        try:
            while self._looked.wait() and not self._ended.is_set():
                self._looked.clear()
                self._asking = time.monotonic()
                deadline = self._declare()
                hung = hangs
                hangs = time.time() > deadline and not any(map(self._is_fine, range(self.world)))
                self._asking = None
                if hung and hangs:
                    self._report()
        finally:
            self._dismiss_bystander()  # no thread would postpone the deadline any more

    def _update(self, now: float) -> None:
        if (seen := (_beats, self._collectives())) != self._seen:
            self._seen, self._since = seen, now
        for stage in list(self._running):
            stage.silence = max(stage.silence, now - self._since)

    def _declare(self) -> float:
        """Set and return the deadline of this rank's next progress, in seconds since 1970."""
        remaining = self.limit - (time.monotonic() - self._since)
        deadline = time.time() + remaining
        if os.fstat(self._file.fileno()).st_size:  # stacks of a thread that was late, not stuck
            self._file.truncate(0)
        os.utime(self._file.fileno(), (deadline, deadline))
        return deadline

    def _dismiss_bystander(self) -> None:
        assert self._bystander is not None
        self._bystander.kill()
        self._bystander.wait()  # from here on it sends no signal

    def _is_fine(self, rank: int) -> bool:
        """Return True if the rank may still be silent. A rank without a file has ended."""
        try:
            return self._of(rank).stat().st_mtime > time.time()
        except FileNotFoundError:
            return False

    def _of(self, rank: int) -> Path:
        return self.folder / f"rank-{rank}.txt"

    # ---- hang ---------------------------------------------------------------------------------------

    def _report(self) -> None:
        try:
            self._write()
        except Exception:  # noqa: BLE001  whatever else is broken, the run ends
            traceback.print_exc()
        os._exit(HUNG)

    def _report_disk(self, seconds: float) -> None:
        """Report a blocked disk on the screen. The process ends only when its threads return from the disk,
        and its launcher learns nothing before that."""
        at, stages = hang.place(_main_stack())["at"], [stage.name for stage in list(self._running)]
        where = f"in stage {stages[-1]}" if stages else "between stages"
        said = (
            f"the disk of {self.folder} has not answered for {seconds:.0f} s, and rank {self.rank} has made "
            f"no progress: {where} at {at}"
        )
        print(f"{_stacks()}\neqlen: {said}", file=sys.stderr, flush=True)
        failures.tell(said, hidden=True)
        os._exit(HUNG)

    def _write(self) -> None:
        self._dismiss_bystander()
        silence = time.monotonic() - self._since
        self.folder.mkdir(parents=True, exist_ok=True)  # a later start may have removed it
        facts: dict[str, Any] = {
            "rank": self.rank,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "silent_seconds": round(silence, 1),
            "stages": [stage.name for stage in list(self._running)],
            "at": hang.place(_main_stack()),
        }
        for more_facts in self._facts_sources:
            facts |= more_facts()
        self._file.write(_stacks())
        self._file.flush()
        write_text(self._of(self.rank).with_suffix(".json"), json.dumps(facts, indent=1, default=str) + "\n")
        index = self.folder / hang.INDEX
        writes = self._await_others() == self.rank
        if writes:
            write_text(index, hang.explain(hang.read(self.folder), self.world))
        self._wait(index.exists, 10.0)
        cause = index.read_text(encoding="utf-8").splitlines()[0] if index.exists() else "the run hangs"
        if writes:
            with contextlib.suppress(OSError):
                events.append(self.folder.parents[1], "hang", file=str(index), text=cause)
        said = f"{cause}; see {index}"
        if not failures.tell(said, hidden=True, everyone=True) and writes:
            print(f"eqlen: {said}", file=sys.stderr, flush=True)

    def _await_others(self) -> int:
        """Wait until all ranks have written their facts, or until a timeout; return the first rank that
        has."""
        facts = [self._of(rank).with_suffix(".json") for rank in range(self.world)]

        def written(rank: int) -> bool:
            return facts[rank].exists() or bystander.has_stacks(self._of(rank))

        self._wait(lambda: all(map(written, range(self.world))), 2 * STUCK * self.interval)
        return next(rank for rank, file in enumerate(facts) if file.exists())

    @staticmethod
    def _wait(for_what: Callable[[], bool], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not for_what() and time.monotonic() < deadline:
            time.sleep(0.1)


def remove_quiet(folder: Path) -> None:
    """Remove the folders under ``folder`` of killed runs, which hold no stacks of a hang."""
    for hang_folder in filter(Path.is_dir, folder.glob("*")):
        if not any(file.stat().st_size for file in hang_folder.iterdir()):
            shutil.rmtree(hang_folder)


def _main_stack() -> traceback.StackSummary:
    frames = sys._current_frames()
    return traceback.extract_stack(frames[threading.main_thread().ident or 0])


def _stacks() -> str:
    """Return the stacks of all threads, main thread first, newest call last."""
    frames = sys._current_frames()
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    texts = []
    for ident, frame in sorted(frames.items(), key=lambda item: item[0] != main):
        stack = "".join(traceback.format_stack(frame))
        texts.append(f"Thread {names.get(ident, ident)} (newest call last):\n{stack}")
    return "\n".join(texts)
