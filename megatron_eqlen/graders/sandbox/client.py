"""Runs a program in isolation: a zygote forks a locked-down process for each run.

    worker (knows the tests) ──descriptors──► zygote (knows nothing) ──fork──► program

The zygote starts before any test arrives, in the programs' interpreter (``probe.find_python``). Programs,
inputs and outputs travel as descriptors of memory files, which it never reads, so a program finds no expected
output and no other program in its memory. When a run ends, its process group and all it left are killed.

A program (``program.py``) has no process, socket or file of its own, a command has processes and a folder.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import secrets
import signal
import socket
import tarfile
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from queue import Empty, LifoQueue

from megatron_eqlen.graders.code.rules import Rules
from megatron_eqlen.graders.sandbox import program
from megatron_eqlen.graders.sandbox.command import FOLDER, CommandLimits, pack
from megatron_eqlen.graders.sandbox.kernel import fixed_addresses
from megatron_eqlen.graders.sandbox.program import Isolation, Limits
from megatron_eqlen.graders.sandbox.zygote import CONNECTION, LARGEST_REQUEST, MOST_THREADS, serve
from megatron_eqlen.graders.workers.host import PACKAGE_ROOT, scrubbed_environment

ZYGOTE = (
    "import sys; from megatron_eqlen.graders.sandbox.zygote import main; "
    "sys.path.remove(sys.argv[1]); main(*sys.argv[2:])"
)
EXTRA_SECONDS = 30.0
"""Seconds beyond a run's wall-clock limit after which the zygote counts as broken."""


class SandboxError(RuntimeError):
    """The sandbox failed, not the program: no verdict can be given."""


@dataclass(frozen=True)
class Execution:
    status: str
    """``finished``, or a verdict: ``compile_error``, ``runtime_error``, ``time_limit``, ``memory_limit``,
    ``output_limit``."""
    stdout: str = ""
    result: str | None = None
    """JSON of what the function returned, for a function call."""
    error: str = ""
    """The end of the traceback."""
    seconds: float = 0.0


@dataclass(frozen=True)
class Command:
    arguments: Sequence[str]
    """The program, looked for on the command's own PATH, and its arguments."""
    stdin: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Added to ``command.ENVIRONMENT``."""
    readable: Sequence[str] = ()
    """Absolute paths of this machine that the command sees too, read-only, beside ``command.SYSTEM``."""
    container: Sequence[str] = ()
    """Start of a command that runs ``arguments`` in a container; ``{folder}`` is the folder's path on this
    machine. The container then isolates; the sandbox limits time, output and the folder's size."""
    root: bool = False
    """The folder is the root that the command sees, beside the machine's places, instead of ``/work``."""


@dataclass(frozen=True)
class CommandEnd:
    status: str
    """``ended``, or the limit that it met: ``time_limit``, ``memory_limit``."""
    code: int | None
    """Exit status, negative for a signal; None at a limit."""
    output: str
    """Standard output and error together; the middle is left out beyond ``CommandLimits.output_bytes``."""
    folder: bytes = field(repr=False)
    """The folder afterwards; the one before, if the one afterwards cannot be kept."""
    unkept: str | None
    """The reason why the folder afterwards cannot be kept."""
    left_out: int
    """Sockets and devices that are not in ``folder``."""
    left_running: int
    """Processes that the command left, which were killed."""
    seconds: float
    """On the clock, without packing."""
    packing_seconds: float


class Sandbox:
    """Runs programs one at a time, in the interpreter ``python``, or (None) in forks of this process."""

    def __init__(self, isolation: Isolation, python: str | None = None) -> None:
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        worker = os.getpid()
        with theirs, fixed_addresses():
            # Another interpreter starts anew, and sees nothing of this process.
            if python is not None:
                # of one length: the text of a number lies in the memory that programs inherit
                arguments = [str(PACKAGE_ROOT), json.dumps(asdict(isolation)), f"{worker:010}"]
                self._zygote = os.posix_spawn(
                    python,
                    [python, "-P", "-s", "-c", ZYGOTE, *arguments],
                    scrubbed_environment(),
                    file_actions=[(os.POSIX_SPAWN_DUP2, theirs.fileno(), CONNECTION)],
                )
            elif (zygote := os.fork()) == 0:
                self._connection.close()
                serve(theirs, isolation, worker)
            else:
                self._zygote = zygote

    def close(self) -> None:
        self._connection.close()
        os.waitpid(self._zygote, 0)

    def run(
        self, source: str, stdin: str, limits: Limits, function: str | None = None, rules: Rules = "plain"
    ) -> Execution:
        """Run ``source`` with ``stdin``, or call its ``function`` with one JSON argument a line of ``stdin``.
        Raises SandboxError if the sandbox itself failed."""
        with contextlib.ExitStack() as stack:
            # stdin, stdout, stderr, source, report
            files = [_memory_file(stack, text) for text in (stdin, "", "", source, "")]
            token = secrets.token_hex(16)
            request = {"command": False, "function": function, "rules": rules, "token": token}
            ending = self._request(request, files, limits)
            _, stdout, _, _, report = files
            kind, told = _record(os.pread(report, limits.output_bytes, 0), token)
            return _interpret(ending, os.pread(stdout, limits.output_bytes, 0), kind, told, limits, function)

    def command(self, command: Command, folder: bytes, limits: CommandLimits) -> CommandEnd:
        """Run a command in ``/work``, which holds the files of ``folder`` (see ``pack_folder``). Raises
        SandboxError if the sandbox failed or cannot isolate commands here, ValueError for a missing path."""
        check_readable(command.readable, command.root)
        began = time.monotonic()
        with contextlib.ExitStack() as stack:
            # stdin, output, folder, request, report
            texts = (command.stdin, "", folder, json.dumps(asdict(command)), "")
            files = [_memory_file(stack, text) for text in texts]
            self._request({"command": True}, files, limits)
            _, output, archive, _, report = map(_contents, files)
        if not report:
            raise SandboxError("the first process of a command died")
        told = json.loads(report)
        # The archive is no folder if packing failed in the middle.
        kept, text = folder if told["unkept"] else archive, output.decode(errors="replace")
        packing = time.monotonic() - began - told["seconds"]
        return CommandEnd(**told, output=text, folder=kept, packing_seconds=packing)

    def _request(self, request: dict, files: list[int], limits: Limits | CommandLimits) -> dict:
        # The zygote ends the run itself at its limit: only a broken one is later.
        self._connection.settimeout(limits.wall_seconds + EXTRA_SECONDS)
        asked = json.dumps(request | {"limits": asdict(limits)}).encode()
        try:
            socket.send_fds(self._connection, [asked], files)
            reply = self._connection.recv(LARGEST_REQUEST)
        except OSError as error:
            raise SandboxError(f"the sandbox does not answer: {error}") from None
        if not reply:
            raise SandboxError("the sandbox's zygote died")
        ending = json.loads(reply)
        if "failed" in ending:
            raise SandboxError(ending["failed"])
        return ending


def check_readable(paths: Sequence[str], root: bool) -> None:
    """Raise ValueError for a place that a command cannot read beside its own (``Command.readable``)."""
    own = ("/tmp", "/root") if root else (FOLDER,)
    for path in paths:
        taken = any(f"{os.path.normpath(path)}/".startswith(f"{mine}/") for mine in own)
        if taken or not (os.path.isabs(path) and os.path.exists(path)):
            wanted = f"absolute paths of this machine to read, outside {' and '.join(own)}"
            raise ValueError(f"expected {wanted}, found {path!r}")


def _record(report: bytes, token: str) -> tuple[str, str]:
    """Return kind and text of the report behind ``token``, or empty texts. Unparsed: it may be forged."""
    start = token.encode() + b" "
    told = report.removeprefix(start).decode(errors="replace") if report.startswith(start) else ""
    kind, _, text = told.partition("\n")
    return kind, text


def _interpret(
    ending: dict, stdout: bytes, kind: str, told: str, limits: Limits, function: str | None
) -> Execution:
    """Return how the program ended. ``ending``: exit, seconds, limits; ``kind``, ``told``: its own report."""
    text = stdout.decode(errors="replace")
    seconds, code = ending["wall"], ending["exit"]
    # In this order, since a limit that was met explains the exit status and what the program reports.
    over = ending["cpu"] > limits.cpu_seconds
    if ending["crowded"]:
        status, error = "runtime_error", f"more than {MOST_THREADS} threads"
    # The kernel sends SIGXCPU or SIGKILL at the limit of CPU time.
    elif ending["timed_out"] or over or code in (-signal.SIGXCPU, -signal.SIGKILL):
        status, error = "time_limit", f"{ending['cpu']:.2f} s CPU, {seconds:.2f} s"
    elif code == -signal.SIGXFSZ:
        status, error = "output_limit", f"more than {limits.output_bytes} bytes"
    elif kind in ("compile_error", "memory_limit"):
        status, error = kind, told[: program.REPORT_TEXT]
    elif code != 0 or kind == "runtime_error":
        status, error = "runtime_error", told[: program.REPORT_TEXT] or f"exit status {code}"
    # The program left by itself, as by ``sys.exit``, so the function has no result.
    elif function is not None and kind != "result":
        status, error = "runtime_error", f"it ended before {function} returned"
    else:
        status, error = "finished", ""
    result = told if status == "finished" and kind == "result" else None
    return Execution(status, text, result, error, seconds)


def pack_folder(folder: str | Path, most_bytes: int = 1 << 40) -> bytes:
    """Return the files below ``folder`` as a command takes them. Raises OSError, FolderError."""
    file = io.BytesIO()
    pack(str(folder), file, most_bytes)
    return file.getvalue()


EMPTY_FOLDER = bytes(tarfile.RECORDSIZE)


def folder_files(folder: bytes) -> dict[str, bytes]:
    """Return the content of the regular files of a packed folder, by their paths in it."""
    with tarfile.open(fileobj=io.BytesIO(folder)) as archive:
        return {
            member.name: file.read()
            for member in archive
            if (member.isreg() or member.islnk()) and (file := archive.extractfile(member))
        }


def _contents(descriptor: int) -> bytes:
    os.lseek(descriptor, 0, os.SEEK_SET)
    with open(descriptor, "rb", closefd=False) as file:
        return file.read()


def _memory_file(stack: contextlib.ExitStack, text: str | bytes) -> int:
    descriptor = os.memfd_create("", os.MFD_CLOEXEC)
    stack.callback(os.close, descriptor)
    with open(descriptor, "wb", closefd=False) as file:
        file.write(text if isinstance(text, bytes) else text.encode(errors="replace"))
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


MOST_SANDBOXES = 3
"""Sandboxes that may fail at the same work, one after the other."""


class SandboxPool:
    """As many sandboxes as work at once. They are closed when nobody holds the pool any more."""

    def __init__(self, make: Callable[[], Sandbox]) -> None:
        self._make = make
        self._idle: LifoQueue[Sandbox] = LifoQueue()
        self.started: list[Sandbox] = []
        weakref.finalize(self, lambda started: [sandbox.close() for sandbox in started], self.started)

    def run[R](self, work: Callable[[Sandbox], R]) -> R:
        """Return ``work``'s result in a sandbox; repeat it if the sandbox was killed. Raises SandboxError."""
        new = 0
        while True:
            # Idle sandboxes may have been killed in any number; only new ones that fail count as attempts.
            try:
                sandbox = self._idle.get_nowait()
            except Empty:
                new += 1
                sandbox = self._make()
                self.started.append(sandbox)
            try:
                result = work(sandbox)
                self._idle.put(sandbox)
                return result
            # A sandbox whose work failed in any way may still be at it: it is not used again.
            except BaseException as error:
                self.started.remove(sandbox)
                sandbox.close()
                if new == MOST_SANDBOXES or not isinstance(error, SandboxError):
                    raise
