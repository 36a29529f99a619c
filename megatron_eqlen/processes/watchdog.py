"""Notices that a run hangs, writes down where every rank stands, and ends it.

    a rank's progress: stages, beats, collectives ─► its deadline: the time stamp of RUN/hang/WHEN/rank-N.txt
    all deadlines have passed ─► stacks into that file, facts into rank-N.json, index.txt ─► status HUNG

A rank that waits for others is silent, too, so one rank's silence says nothing: only when no rank has made
progress for as long as it may take does the run hang. Each rank looks by itself, from a thread; they meet in
the run folder alone, which another thread asks: its disk may block, and then that is told on the screen.
Where no thread can run (C code that keeps Python's lock), faulthandler's does, which needs no lock.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
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
from megatron_eqlen.processes import bystander, failures, hang

HUNG = 75
"""Exit status of a run that hung: ``EX_TEMPFAIL`` of sysexits.h, to be tried again."""
FIRST = 3.0
"""Times ``seconds`` that a stage may be silent before any of its kind has ended, and a rank between stages:
engines start, kernels are compiled, weights are read."""
LONGER = 10.0
"""Times the median of a stage's longest silences so far: what it may take later, but at least ``seconds``,
and not more than the first time: ranks that wait for others are silent, too."""
REMEMBERED = 50
"""Newest silences of a stage that its median is of."""
STUCK = 10
"""Looks that the watching thread may miss before it counts as stuck. Not fewer: faulthandler reads the frames
of threads that may run."""

_beats = 0


def beat() -> None:
    """Something went on that may be the only sign of life for long: tokens came, a row was computed."""
    global _beats
    _beats += 1


class Running:
    """A stage that goes on."""

    def __init__(self, name: str, patience: float) -> None:
        self.name, self.patience = name, patience
        self.silence = 0.0
        """Its longest so far, seconds."""


class Watchdog:
    """Of one rank of ``world``. It knows the stages from the beginning, and watches after ``start``.

    ``seconds`` (``cluster.watchdog_seconds``) is how long there may be no progress; None: it never watches.
    ``collectives`` is a number or anything else that changes when one begins or ends.
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
        """When progress was seen last."""
        self._ended, self._looked = threading.Event(), threading.Event()
        self._asking: float | None = None
        """Since when the run folder is asked."""
        self._threads: list[threading.Thread] = []
        self._bystander: subprocess.Popen[bytes] | None = None

    @contextlib.contextmanager
    def stage(self, name: str, patience: float = 0.0) -> Iterator[None]:
        """A stage goes on in the block, which gives up by itself after ``patience`` seconds of silence."""
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
        """Add the result of ``facts`` to this rank's facts of a hang. The watchdog calls ``facts`` while the
        run hangs, from another thread: it must take no lock."""
        self._facts_sources.append(facts)

    def start(self, folder: Path) -> None:
        """Watch from now on; all ranks of the run pass the same ``folder``, which is this try's alone. Its
        parent is for those of all tries, and goes with the last of them."""
        if self.seconds is None:
            return
        self.interval = min(self.seconds / 20, 30.0)
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._file = open(self._of(self.rank), "w", encoding="utf-8")  # noqa: SIM115 (faulthandler's)
        self._since = time.monotonic()
        self._declare()
        if self.world == 1:
            command = [sys.executable, "-IS", bystander.__file__, self._file.name, str(STUCK * self.interval)]
            self._bystander = subprocess.Popen(command, start_new_session=True)  # Ctrl-C is not for it
        for name, work in (("watchdog", self._watch), ("watchdog-disk", self._ask)):
            self._threads.append(threading.Thread(target=work, daemon=True, name=name))
            self._threads[-1].start()

    def stop(self) -> None:
        """The rank ends well, or has said why it does not; where the run hangs this never returns: the first
        rank that leaves breaks the others' collectives. Safe to call twice, and before ``start``."""
        self._ended.set()
        self._looked.set()
        if not self._threads:
            return
        for thread in self._threads:
            thread.join()
        self._threads.clear()
        if self._bystander is not None:
            self._bystander.kill()
            self._bystander.wait()
        self._file.close()
        self._of(self.rank).unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # others are still there, or what tries that hung have left
            self.folder.rmdir()
            self.folder.parent.rmdir()

    @property
    def limit(self) -> float:
        """Seconds for which this rank may be silent now."""
        assert self.seconds is not None
        running = list(self._running)
        return max([self._limit(one) for one in running], default=FIRST * self.seconds)

    def _limit(self, stage: Running) -> float:
        assert self.seconds is not None
        if silences := self._silences[stage.name]:
            longest = LONGER * statistics.median(silences)
            return min(max(longest, self.seconds), FIRST * self.seconds) + stage.patience
        return FIRST * self.seconds + stage.patience

    # ---- the threads --------------------------------------------------------------------------------

    def _watch(self) -> None:
        looked = time.monotonic()
        while not self._ended.wait(self.interval):
            now = time.monotonic()
            if now - looked > 10 * self.interval:  # this process was stopped meanwhile, others perhaps, too
                self._since = now
            looked = now
            self._look(now)
            asking = self._asking
            if asking is None:
                self._looked.set()
            elif min(now - asking, now - self._since - self.limit) > STUCK * self.interval:
                self._report_disk(now - asking)

    def _ask(self) -> None:
        """After each look: tell the run folder, and ask it for the others. What looks like a hang must do so
        after the next look, too: a process may be stopped between the two, while the clock runs on."""
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
            faulthandler.cancel_dump_traceback_later()  # nobody would put it off any more

    def _look(self, now: float) -> None:
        if (seen := (_beats, self._collectives())) != self._seen:
            self._seen, self._since = seen, now
        for stage in list(self._running):
            stage.silence = max(stage.silence, now - self._since)

    def _declare(self) -> float:
        """Say until when this rank is fine, if there is no more progress; seconds since 1970."""
        left = self.limit - (time.monotonic() - self._since)
        deadline = time.time() + left
        if os.fstat(self._file.fileno()).st_size:  # stacks of a thread that was late, not stuck
            self._file.seek(0)
            self._file.truncate()
        os.utime(self._file.fileno(), (deadline, deadline))
        later = max(left, 0.0) + STUCK * self.interval  # the other ranks, or a bystander, see what it writes
        faulthandler.dump_traceback_later(later, file=self._file)
        return deadline

    def _is_fine(self, rank: int) -> bool:
        """Whether the rank may be silent still. One whose file is gone has ended."""
        try:
            return self._of(rank).stat().st_mtime > time.time()
        except FileNotFoundError:
            return False

    def _of(self, rank: int) -> Path:
        return self.folder / f"rank-{rank}.txt"

    # ---- a hang -------------------------------------------------------------------------------------

    def _report(self) -> None:
        try:
            self._write()
        except Exception:  # noqa: BLE001  whatever else is broken, the run ends
            traceback.print_exc()
        os._exit(HUNG)

    def _report_disk(self, seconds: float) -> None:
        """Nothing can be written where it belongs. The process cannot end before its threads come back from
        the disk; its launcher can be told nothing before that."""
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
        faulthandler.cancel_dump_traceback_later()
        silence = time.monotonic() - self._since
        self.folder.mkdir(parents=True, exist_ok=True)  # a later try may have removed it
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
        said = f"{cause}; see {index}"
        if not failures.tell(said, everyone=True) and writes:
            print(f"eqlen: {said}", file=sys.stderr, flush=True)

    def _await_others(self) -> int:
        """Wait until all ranks have written, or had the time to; the first that has."""
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
    """Remove what tries that did not hang have left under ``folder``: they were killed."""
    for one in filter(Path.is_dir, folder.glob("*")):
        if not any(file.stat().st_size for file in one.iterdir()):
            for file in one.iterdir():
                file.unlink()
            one.rmdir()


def _main_stack() -> traceback.StackSummary:
    frames = sys._current_frames()
    return traceback.extract_stack(frames[threading.main_thread().ident or 0])


def _stacks() -> str:
    """Every thread's, the main thread's first, the newest call last."""
    frames = sys._current_frames()
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    texts = []
    for ident, frame in sorted(frames.items(), key=lambda item: item[0] != main):
        stack = "".join(traceback.format_stack(frame))
        texts.append(f"Thread {names.get(ident, ident)} (newest call last):\n{stack}")
    return "\n".join(texts)
