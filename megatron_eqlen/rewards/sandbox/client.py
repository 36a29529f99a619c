"""Running a program in isolation: a zygote that forks a locked-down process for each run.

    worker (knows the tests) ──descriptors──► zygote (knows nothing) ──fork──► program

The zygote is forked from the worker before any test arrives and never reads a program, an input or an
output: they travel as descriptors of memory files. So a program finds no expected output in its memory,
and nothing of the programs before it. Ending a run kills its whole process group and everything it left
behind.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import select
import signal
import socket
import time
from dataclasses import asdict, dataclass
from itertools import pairwise

from megatron_eqlen.rewards.sandbox import program
from megatron_eqlen.rewards.sandbox.kernel import SET_CHILD_SUBREAPER, prctl
from megatron_eqlen.rewards.sandbox.program import Isolation, Limits, Rules

LARGEST_REQUEST = 4096
MOST_THREADS = 256
"""Threads a program may have at once. A system-call filter cannot count them, and RLIMIT_NPROC counts all of
the user's, which only root can make the program's alone (``program.HARD_THREADS``); so the zygote looks."""
WATCH_SECONDS = 0.01
"""Seconds between two looks at the number of threads."""
EXTRA_SECONDS = 30.0
"""Seconds beyond a run's wall-clock limit after which the zygote counts as broken."""


class SandboxError(RuntimeError):
    """The sandbox failed, not the program: no verdict can be given."""


@dataclass(frozen=True)
class Execution:
    """End of one run of a program."""

    status: str
    """``finished``, or a verdict: ``compile_error``, ``runtime_error``, ``time_limit``, ``memory_limit``,
    ``output_limit``."""
    stdout: str = ""
    result: str | None = None
    """JSON of what the function returned, for a function call."""
    error: str = ""
    """The end of the traceback."""
    seconds: float = 0.0


class Sandbox:
    """Runs programs one at a time. Use as a context manager, or ``close``."""

    def __init__(self, isolation: Isolation) -> None:
        self.isolation = isolation
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._zygote = os.fork()
        if self._zygote == 0:
            self._connection.close()
            _serve(theirs, isolation)
        theirs.close()

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._connection.close()
        os.waitpid(self._zygote, 0)

    def run(
        self,
        source: str,
        stdin: str,
        limits: Limits,
        function: str | None = None,
        rules: Rules = "plain",
    ) -> Execution:
        """Run ``source`` with ``stdin``; or call its ``function`` with one JSON argument a line of ``stdin``.

        Raises SandboxError if the sandbox itself failed.
        """
        with contextlib.ExitStack() as stack:
            files = [_memory_file(stack, text) for text in (stdin, "", "", source, "")]
            token = secrets.token_hex(16)
            request = {"limits": asdict(limits), "function": function, "rules": rules, "token": token}
            ending = self._request(json.dumps(request).encode(), files, limits.wall_seconds)
            _, stdout, _, _, report = files
            kind, told = _record(_read(report, limits.output_bytes), token)
            return _interpret(ending, _read(stdout, limits.output_bytes), kind, told, limits, function)

    def _request(self, request: bytes, files: list[int], wall_seconds: float) -> dict:
        self._connection.settimeout(wall_seconds + EXTRA_SECONDS)
        try:
            socket.send_fds(self._connection, [request], files)
            reply = self._connection.recv(LARGEST_REQUEST)
        except OSError as error:
            raise SandboxError(f"the sandbox does not answer: {error}") from None
        if not reply:
            raise SandboxError("the sandbox's zygote died")
        ending = json.loads(reply)
        if "failed" in ending:
            raise SandboxError(ending["failed"])
        return ending


def _record(report: bytes, token: str) -> tuple[str, str]:
    """Return kind and text of the report behind ``token``; empty texts if it starts otherwise.

    No text is parsed here: a program may forge one of any size and shape.
    """
    start = token.encode() + b" "
    told = report.removeprefix(start).decode(errors="replace") if report.startswith(start) else ""
    kind, _, text = told.partition("\n")
    return kind, text


def _interpret(
    ending: dict, stdout: bytes, kind: str, told: str, limits: Limits, function: str | None
) -> Execution:
    """Return how the program ended. ``ending``: exit, cpu and wall seconds, timed_out, crowded; ``kind`` and
    ``told``: the program's own report."""
    text = stdout.decode(errors="replace")
    seconds, code = ending["wall"], ending["exit"]
    over = ending["cpu"] > limits.cpu_seconds
    if ending["crowded"]:
        status, error = "runtime_error", f"more than {MOST_THREADS} threads"
    elif ending["timed_out"] or over or code in (-signal.SIGXCPU, -signal.SIGKILL):
        status, error = "time_limit", f"{ending['cpu']:.2f} s CPU, {seconds:.2f} s"
    elif code == -signal.SIGXFSZ:
        status, error = "output_limit", f"more than {limits.output_bytes} bytes"
    elif kind in ("compile_error", "memory_limit"):
        status, error = kind, told[: program.REPORT_TEXT]
    elif code != 0 or kind == "runtime_error":
        status, error = "runtime_error", told[: program.REPORT_TEXT] or f"exit status {code}"
    elif function is not None and kind != "result":
        status, error = "runtime_error", f"it ended before {function} returned"
    else:
        status, error = "finished", ""
    result = told if status == "finished" and kind == "result" else None
    return Execution(status, text, result, error, seconds)


def _serve(connection: socket.socket, isolation: Isolation) -> None:
    """Run the zygote: fork, wait, clean up, answer; end with the worker."""
    _close_all_but(connection.fileno())  # do not keep the worker's open
    prctl(SET_CHILD_SUBREAPER, 1)  # processes that a program leaves behind become our children
    zygote = os.getpid()  # a program that asked for its parent might find this process gone already
    while True:
        request, descriptors, _, _ = socket.recv_fds(connection, LARGEST_REQUEST, 5)
        if not request:
            os._exit(0)
        asked = json.loads(request)
        limits = Limits(**asked["limits"])
        started = time.monotonic()
        ready, told = os.pipe()
        try:
            pid = os.fork()
        except OSError as error:
            connection.send(json.dumps({"failed": f"fork: {error}"}).encode())
            continue
        if pid == 0:
            _become_program(zygote, descriptors, told, limits, isolation, asked)
        os.close(told)
        for descriptor in descriptors:
            os.close(descriptor)
        ending = _wait(pid, started + limits.wall_seconds, connection)
        refused = os.read(ready, 500).decode(errors="replace")
        os.close(ready)
        ending["wall"] = time.monotonic() - started
        _kill_leftovers()
        connection.send(json.dumps({"failed": refused} if refused else ending).encode())


def _close_all_but(*kept: int) -> None:
    """Close all descriptors except 0, 1, 2 and those named."""
    for before, after in pairwise(sorted({2, *kept, 1 << 16})):
        if before + 1 < after:
            os.closerange(before + 1, after)


def _become_program(
    zygote: int,
    descriptors: list[int],
    pipe: int,
    limits: Limits,
    isolation: Isolation,
    asked: dict,
) -> None:
    """In the child: lock down, run, exit. A failure before the program starts counts as the sandbox's."""
    try:
        null = os.open(os.devnull, os.O_RDWR)
        told = program.NULL + 1
        targets = [*range(len(descriptors)), program.NULL, told]
        copies = [fcntl.fcntl(source, fcntl.F_DUPFD, told + 1) for source in (*descriptors, null, pipe)]
        for target, descriptor in zip(targets, copies, strict=True):
            os.dup2(descriptor, target)
        os.closerange(told + 1, 1 << 12)
        program.enter(limits, isolation, zygote)
    except BaseException as error:  # noqa: BLE001 - told to the parent, who raises it
        os.write(told, f"cannot isolate: {type(error).__name__}: {error}"[:500].encode())
        os._exit(1)
    os.close(told)
    program.run(asked["function"], asked["rules"], asked["token"])


def _wait(pid: int, deadline: float, connection: socket.socket) -> dict:
    """Wait until the program ends, has too many threads or reaches its deadline; then kill the rest of it.

    A worker that goes away ends the wait too.
    """
    tasks = os.open(f"/proc/{pid}/task", os.O_RDONLY)
    process = os.pidfd_open(pid)
    poll = select.poll()
    poll.register(process, select.POLLIN)
    poll.register(connection, 0)  # only to notice that it is gone
    events: list[tuple[int, int]] = []
    crowded = timed_out = False
    while not (events or crowded or timed_out):
        left = deadline - time.monotonic()
        events = poll.poll(max(0.0, min(left, WATCH_SECONDS)) * 1000)
        crowded = os.fstat(tasks).st_nlink - 2 > MOST_THREADS  # the kernel counts threads as links
        timed_out = not events and left <= 0
    os.close(process)
    os.close(tasks)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    _, status, usage = os.wait4(pid, 0)
    return {
        "exit": os.waitstatus_to_exitcode(status),
        "cpu": usage.ru_utime + usage.ru_stime,
        "timed_out": timed_out,
        "crowded": crowded,
    }


def _kill_leftovers() -> None:
    """Kill and reap every process a run left behind (none can be, under seccomp)."""
    children = f"/proc/self/task/{os.getpid()}/children"
    while True:
        try:
            with open(children) as file:
                pids = [int(pid) for pid in file.read().split()]
        except FileNotFoundError:
            pids = []
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            os.waitpid(-1, 0 if pids else os.WNOHANG)
        except ChildProcessError:
            return
        if not pids:
            return


def _memory_file(stack: contextlib.ExitStack, text: str) -> int:
    descriptor = os.memfd_create("", os.MFD_CLOEXEC)
    stack.callback(os.close, descriptor)
    data = text.encode(errors="replace")
    while data:
        data = data[os.write(descriptor, data) :]
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def _read(descriptor: int, limit: int) -> bytes:
    return os.pread(descriptor, limit, 0)
