"""Record the first cause of a rank's failure, for its launcher and for the run folder.

    the rank that fails   record ─► TORCHELASTIC_ERROR_FILE (torch's own form) ─► the launcher's last lines
                                └─► RUN/events.jsonl (``events``)

Other ranks soon fail as well, because a collective breaks: their failures are consequences.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import resource
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_eqlen.files import DISK_FULL
from megatron_eqlen.processes import events
from megatron_eqlen.processes.hold import HeldError

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
"""Environment variable: the file from which torch's launchers read a rank's failure."""
CONSEQUENCES = re.compile(
    r"gloo/transport|ncclRemoteError|NCCL communicator was aborted|DistNetworkError|DistStoreError|TCPStore"
    r"|ProcessGroup.*(abort|tim(ed|e) ?out)|Timed out waiting .* for (send|recv)"
)
"""Messages of a rank that lost another rank."""

TRACEBACK = "EQLEN_TRACEBACK"
"""Environment variable: if set, the traceback of an expected error is shown as well."""

_run: Path | None = None
_told: bool | None = None
"""Return value of ``tell``; None: not called yet."""


PAUSES = (1.0, 2.0)
"""Seconds before the second and the third attempt, which is the last."""
LONGEST = 4000
"""Most characters of an error's message: values that it repeats may have a million items."""


class ExpectedError(RuntimeError):
    """Error whose message is sufficient, like a user's ValueError; no traceback is shown."""


@dataclass(frozen=True)
class Failure:
    """Cause of a rank's end, at ``time`` (seconds since 1970)."""

    rank: int | None
    """Rank that ended; None: all ranks."""
    host: str
    message: str
    time: float
    traceback: str = ""
    """Empty if the message is sufficient: a user's mistake."""

    @property
    def is_consequence(self) -> bool:
        """True if another rank's end has probably caused this failure."""
        return bool(CONSEQUENCES.search(self.message))

    def __str__(self) -> str:
        who = "" if self.rank is None else f"rank {self.rank} on {self.host} failed first: "
        return who + ("another rank was lost: " if self.is_consequence else "") + self.message


def first(failures: Sequence[Failure]) -> Failure:
    # False comes before True: a cause, however late, before any consequence.
    return min(failures, key=lambda failure: (failure.is_consequence, failure.time))


def keep_in(run: Path) -> None:
    """Record this rank's failure in the folder ``run``, too, from now on."""
    global _run
    _run = run


def is_expected(error: BaseException) -> bool:
    """Return True if the message suffices: a user's mistake, a file or disk error, another rank's end."""
    known = isinstance(error, ValueError | FileNotFoundError | ExpectedError)
    # An OSError that names no file, such as a socket's, is a fault of the program unless the disk is full.
    disk = isinstance(error, OSError) and (error.filename is not None or error.errno in DISK_FULL)
    return (known or disk or bool(CONSEQUENCES.search(text_of(error)))) and TRACEBACK not in os.environ


def words(error: BaseException) -> str:
    """Return the message and notes. Errors of the operating system read ``PATH: what is wrong``."""
    text = _message(error) + "".join(f" ({note})" for note in getattr(error, "__notes__", []))
    # Too many open files: the limit says what to raise.
    if os.strerror(errno.EMFILE) in text:
        text += f" (ulimit -n: {resource.getrlimit(resource.RLIMIT_NOFILE)[0]})"
    # Beginning and end are kept, where errors say what and why.
    cut, half = len(text) - LONGEST, LONGEST // 2
    return text if cut <= 0 else f"{text[:half]} [… {cut:,} characters …] {text[-half:]}"


def text_of(error: BaseException) -> str:
    """Return ``str(error)``; if a foreign error's ``__str__`` fails, say so."""
    try:
        return str(error)
    except (Exception, SystemExit) as failure:  # noqa: BLE001  foreign code
        return f"its message cannot be read ({type(failure).__name__})"


def name_of(error: BaseException) -> str:
    """Return ``TYPE: MESSAGE``."""
    return f"{type(error).__name__}: {text_of(error)}"


def fault_of(error: BaseException) -> str:
    """Return ``TYPE at FILE:LINE: MESSAGE``, of a user's line, or of a library's if there is none."""
    frames, package = traceback.extract_tb(error.__traceback__), f"{Path(__file__).parents[1]}/"
    ours = re.compile(rf"/site-packages/|/lib/python3|^{re.escape(package)}")
    at = ([frame for frame in frames if not ours.search(frame.filename)] or frames)[-1]
    return f"{type(error).__name__} at {Path(at.filename).name}:{at.lineno}: {text_of(error)}"


def _message(error: BaseException) -> str:
    # An HTTP library's OSError has no ``strerror``.
    if not isinstance(error, OSError) or error.strerror is None:
        return text_of(error)
    # Renaming names two files: ``a -> b: No space left on device``.
    paths = [str(path) for path in (error.filename, error.filename2) if path is not None]
    full = f" ({free_space(Path(paths[0]))})" if paths and error.errno in DISK_FULL else ""
    return ": ".join([*([" -> ".join(paths)] if paths else []), error.strerror]) + full


def free_space(path: Path) -> str:
    """Return a text with the free space at ``path``, or its nearest existing parent: bytes, or files."""
    existing = next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.exists())
    free = os.statvfs(existing)
    few = f", for {free.f_favail} files" if free.f_favail < 10 and free.f_files else ""  # Btrfs counts none
    return f"{free.f_bavail * free.f_frsize / 1e9:.2f} GB are free there{few}"


def run_script(main: Callable[[], None]) -> None:
    """Run the ``main`` of a script in ``tools/``; print an expected error in one line, with status 2."""
    try:
        main()
    except Exception as error:
        if not is_expected(error):
            raise
        print(f"{Path(sys.argv[0]).name}: {words(error)}", file=sys.stderr)
        sys.exit(2)


def record(error: BaseException) -> bool:
    """Record the error that ends this process, once. Return True if a launcher will print it."""
    hidden = isinstance(error, HeldError)
    if is_expected(error):
        return tell(words(error), hidden=hidden)
    stack = "".join(traceback.format_exception(error))
    return tell(f"{type(error).__name__}: {words(error)}", stack, hidden)


def tell(message: str, stack: str = "", hidden: bool = False, everyone: bool = False) -> bool:
    """Record a failure without an exception, for all ranks with ``everyone``. ``hidden``: not in the run's
    folder, which another process holds."""
    global _told
    if _told is None:
        rank = None if everyone else int(os.environ.get("RANK", "0"))
        failure = Failure(rank, socket.gethostname(), message, time.time(), stack)
        # A consequence would be taken for the run's error by ``eqlen status``.
        if _run is not None and not hidden and not failure.is_consequence:
            with contextlib.suppress(OSError):
                events.append(_run, "error", text=f"{failure}\n{stack}".rstrip())
        file = os.environ.get(ERROR_FILE)
        _told = file is not None and _write(Path(file), failure)
    return _told


def read(folder: Path) -> list[Failure]:
    """Return the failures that the ranks of a launcher have recorded in files under ``folder``."""
    written = [json.loads(file.read_text(encoding="utf-8")) for file in sorted(folder.rglob("error.json"))]
    return [Failure(**each["message"]["extraInfo"]["eqlen"]) for each in written]


def _write(path: Path, failure: Failure) -> bool:
    """Write a new file in the form of torch's ErrorHandler; return False if it exists or cannot be made."""
    # torch reads ``message``, ``py_callstack`` and whole seconds; ``read`` takes ``eqlen``.
    stack, when = failure.traceback or failure.message, str(int(failure.time))
    extra = {"py_callstack": stack, "timestamp": when, "eqlen": vars(failure)}
    try:
        with open(path, "x", encoding="utf-8") as file:
            json.dump({"message": {"message": failure.message, "extraInfo": extra}}, file)
    except FileExistsError:
        return False
    except OSError:
        # Half a file would stop the launcher, which parses it.
        path.unlink(missing_ok=True)
        return False
    return True


def retried[R](work: Callable[[], R], pauses: Sequence[float] = PAUSES) -> R:
    """Return the result of a call, which is made again after an error of a connection: an OSError without an
    ``errno``, unlike those of files, comes from an HTTP library."""
    for pause in pauses:
        try:
            return work()
        except OSError as error:
            if error.errno is not None and not isinstance(error, ConnectionError | TimeoutError):
                raise
            time.sleep(pause)
    return work()
