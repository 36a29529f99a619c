"""Handle Ctrl-C, a closed terminal and a scheduler's SIGTERM in the process that a user started. First
SIGINT: the run stops after its step, with a checkpoint, as with ``touch RUN/STOP``. Second SIGINT, SIGTERM or
SIGHUP: the process and its children end at once. A run can be resumed from any moment."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from functools import partial
from pathlib import Path
from signal import SIG_BLOCK, SIG_UNBLOCK
from types import FrameType
from typing import NoReturn

from megatron_eqlen.processes.lifeline import end_descendants

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupts:
    """State of the requests so far. ``stop``: the run's STOP file; None for a command without one."""

    def __init__(self, stop: Path | None) -> None:
        self._stop = stop
        self._asked = False

    def ends(self, number: int) -> bool:
        """Return True if signal ``number`` ends this process now; False if the run was asked to stop."""
        if number == signal.SIGINT and not self._asked and self._stop and self._stop.parent.is_dir():
            self._asked = True
            self._stop.touch()
            _say("stops after this step, with a checkpoint; Ctrl-C again ends it at once")
            return False
        # The run ends at once instead, so its next start shall not find the request.
        if self._asked and self._stop:
            self._stop.unlink(missing_ok=True)
        _say(f"ended by {signal.Signals(number).name}; the same command resumes it")
        return True


def begin() -> None:
    """Make Ctrl-C raise KeyboardInterrupt. During an import it ends the process at once, since C modules lose
    or print the exception. A rank ends without a word: its launcher prints the line."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL if "RANK" in os.environ else _interrupt)


def end() -> int:
    """Print that Ctrl-C ended this command; return its exit status."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a second Ctrl-C, while Python ends
    _say("ended by SIGINT")
    return 128 + signal.SIGINT


def _interrupt(_: int, frame: FrameType | None) -> NoReturn:
    # Look through the frames for an import in progress.
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            os._exit(end())
        frame = frame.f_back
    raise KeyboardInterrupt


def handled() -> list[signal.Signals]:
    """Return the signals of ``ENDING`` that the caller of this process does not ignore (``nohup``)."""
    return [number for number in ENDING if signal.getsignal(number) is not signal.SIG_IGN]


def watch(interrupts: Interrupts) -> None:
    """Handle signals in a thread: the main thread may be in C code, which no Python handler interrupts."""
    rung, bell = socket.socketpair()
    bell.setblocking(False)
    for number in handled():
        signal.signal(number, lambda *_: None)  # a Python handler only lets it interrupt waiting C code
    # C code of Python writes each signal's number to the socket, even if no bytecode runs.
    signal.set_wakeup_fd(bell.detach(), warn_on_full_buffer=False)
    # A signal during a fork waits: the child would write it to the parent's socket.
    hold, release = (partial(signal.pthread_sigmask, how, ENDING) for how in (SIG_BLOCK, SIG_UNBLOCK))
    os.register_at_fork(before=hold, after_in_parent=release, after_in_child=_forget)
    threading.Thread(target=_handle, args=(rung, interrupts), daemon=True, name="signals").start()


def _handle(rung: socket.socket, interrupts: Interrupts) -> NoReturn:
    while True:
        # Each byte is the number of a signal.
        for number in rung.recv(64):
            if number in ENDING and interrupts.ends(number):
                end_descendants()
                os._exit(128 + number)


def _forget() -> None:
    """Restore default SIGTERM and SIGHUP in a forked child; ignore SIGINT, which the parent handles."""
    signal.set_wakeup_fd(-1)
    for number in handled():
        signal.signal(number, signal.SIG_IGN if number == signal.SIGINT else signal.SIG_DFL)
    signal.pthread_sigmask(SIG_UNBLOCK, ENDING)


def _say(text: str) -> None:
    try:
        print(f"eqlen: {text}", file=sys.stderr, flush=True)
    except OSError:
        return  # the terminal is gone
