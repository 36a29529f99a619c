"""What ended a rank, written down where its launcher and the run folder have it: told once, the first cause.

    the rank that fails   record ─► TORCHELASTIC_ERROR_FILE (torch's own form) ─► the launcher's last lines
                                └─► RUN/first_error.txt, if no other rank was first (several nodes)

Other ranks soon fail, too, because a collective breaks: those are consequences.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_eqlen.files import DISK_FULL
from megatron_eqlen.processes.hold import HeldError

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
"""Environment variable: where torch's launchers want to read what ended a rank."""
FIRST = "first_error.txt"
"""In a run's folder; empty where the disk had no room for the words."""
CONSEQUENCES = re.compile(
    r"gloo/transport|ncclRemoteError|NCCL communicator was aborted|DistNetworkError|DistStoreError|TCPStore"
    r"|ProcessGroup.*(abort|tim(ed|e) ?out)|Timed out waiting .* for (send|recv)"
)
"""What a rank says that has lost another one."""
PEER = re.compile(r"\[(?:::ffff:)?([0-9a-fA-F.:]+)\]:\d+|peer ([\w.-]+)<\d+>")
"""Address of the lost one in gloo's words, or its host in NCCL's."""

TRACEBACK = "EQLEN_TRACEBACK"
"""Environment variable: if it is set, the traceback of an expected error is shown, too."""

_run: Path | None = None
_told: bool | None = None
"""What ``tell`` returned; None: not called yet."""


class ExpectedError(RuntimeError):
    """What no programmer needs to look into, like a ValueError of a user's: its message says all."""


@dataclass(frozen=True)
class Failure:
    """What ended a rank, at ``time`` (seconds since 1970)."""

    rank: int | None
    """None: all of them together."""
    host: str
    message: str
    time: float
    traceback: str = ""
    """Empty where the message says all: a user's mistake."""

    @property
    def is_consequence(self) -> bool:
        """Whether another rank's end is likely to have caused this one's."""
        return bool(CONSEQUENCES.search(self.message))

    def __str__(self) -> str:
        who = "" if self.rank is None else f"rank {self.rank} on {self.host} failed first: "
        return who + ("another rank was lost: " if self.is_consequence else "") + self.message


def first(failures: Sequence[Failure]) -> Failure:
    return min(failures, key=lambda one: (one.is_consequence, one.time))


def keep_in(run: Path) -> None:
    """From now on the first failure of all ranks is written to ``run``, too."""
    global _run
    _run = run


def is_expected(error: BaseException) -> bool:
    """Return whether the message says all: a user's mistake, a file or disk, or another rank's end."""
    known = isinstance(error, ValueError | FileNotFoundError | ExpectedError)
    disk = isinstance(error, OSError) and (error.filename is not None or error.errno in DISK_FULL)
    return (known or disk or bool(CONSEQUENCES.search(str(error)))) and TRACEBACK not in os.environ


def words(error: BaseException) -> str:
    """Return the message and notes: of an error of the operating system ``PATH: what is wrong``, of a lost
    connection first to which host."""
    text = _message(error) + "".join(f" ({note})" for note in getattr(error, "__notes__", []))
    host = _lost_host(text) if CONSEQUENCES.search(text) else ""
    return f"lost the connection to {host}: {text}" if host else text


def _message(error: BaseException) -> str:
    if not isinstance(error, OSError) or error.strerror is None:
        return str(error)
    paths = [str(path) for path in (error.filename, error.filename2) if path is not None]
    full = f" ({free_space(Path(paths[0]))})" if paths and error.errno in DISK_FULL else ""
    return ": ".join([*([" -> ".join(paths)] if paths else []), error.strerror]) + full


def free_space(path: Path) -> str:
    """Return how much is free where ``path`` is, or would be."""
    there = next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.exists())
    return f"{shutil.disk_usage(there).free / 1e9:.2f} GB are free there"


def _lost_host(text: str) -> str:
    """Empty where the text names none, or this machine."""
    found = PEER.search(text)
    address = (found[1] or found[2]) if found else ""
    if not address or address.startswith("127.") or address == "::1":
        return ""
    try:
        return socket.gethostbyaddr(address)[0]
    except OSError:
        return address


def run_script(main: Callable[[], None]) -> None:
    """Run the ``main`` of a script in ``tools/``; an error whose message says all ends it in one line, with
    status 2."""
    try:
        main()
    except Exception as error:
        if not is_expected(error):
            raise
        print(f"{Path(sys.argv[0]).name}: {words(error)}", file=sys.stderr)
        sys.exit(2)


def record(error: BaseException) -> bool:
    """Write down what ends this process, once; whether a launcher will tell it."""
    hidden = isinstance(error, HeldError)
    if is_expected(error):
        return tell(words(error), hidden=hidden)
    stack = "".join(traceback.format_exception(error))
    return tell(f"{type(error).__name__}: {words(error)}", stack, hidden)


def tell(message: str, stack: str = "", hidden: bool = False, everyone: bool = False) -> bool:
    """The same of what is no exception. ``hidden``: from the run's folder, which is another process's now.
    ``everyone``: it ends all ranks."""
    global _told
    if _told is None:
        rank = None if everyone else int(os.environ.get("RANK", "0"))
        failure = Failure(rank, socket.gethostname(), message, time.time(), stack)
        run = None if hidden or failure.is_consequence else _run
        if run is not None and not _write(run / FIRST, f"{failure}\n{stack}"):
            with contextlib.suppress(OSError):
                (run / FIRST).touch()  # a full disk still has room for a name
        file = os.environ.get(ERROR_FILE)
        _told = file is not None and _write(Path(file), _to_torch(failure))
    return _told


def read(folder: Path) -> list[Failure]:
    """What the ranks of a launcher have recorded in files somewhere under ``folder``."""
    return [_from_torch(file.read_text(encoding="utf-8")) for file in sorted(folder.rglob("error.json"))]


def _write(path: Path, text: str) -> bool:
    """Write a file that does not exist; whether that went well. What ends this process may be a full disk."""
    try:
        with open(path, "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        return False
    except OSError:
        path.unlink(missing_ok=True)
        return False
    return True


def _to_torch(failure: Failure) -> str:
    """What ``torch.distributed.elastic.multiprocessing.errors.ErrorHandler`` writes, and a little more."""
    extra = {
        "py_callstack": failure.traceback or failure.message,
        "timestamp": str(int(failure.time)),
        "eqlen": vars(failure),
    }
    return json.dumps({"message": {"message": failure.message, "extraInfo": extra}})


def _from_torch(text: str) -> Failure:
    return Failure(**json.loads(text)["message"]["extraInfo"]["eqlen"])
