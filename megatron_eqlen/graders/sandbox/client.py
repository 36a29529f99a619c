"""Running a program in isolation: a zygote that forks a locked-down process for each run.

    worker (knows the tests) ──descriptors──► zygote (knows nothing) ──fork──► program

The zygote starts before any test arrives, in the interpreter that programs run in (``interpreter.py``), and
never reads a program, an input or an output: they travel as descriptors of memory files. So a program finds
no expected output in its memory, and nothing of the programs before it. Ending a run kills its whole process
group and everything it left behind.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
from dataclasses import asdict, dataclass

from megatron_eqlen.graders.code.rules import Rules
from megatron_eqlen.graders.sandbox import program
from megatron_eqlen.graders.sandbox.kernel import fixed_addresses
from megatron_eqlen.graders.sandbox.program import Isolation, Limits
from megatron_eqlen.graders.sandbox.zygote import CONNECTION, LARGEST_REQUEST, MOST_THREADS, serve
from megatron_eqlen.graders.workers.process import PACKAGE_ROOT, scrubbed_environment

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
    """Runs programs one at a time, in the interpreter at ``python`` (None: in forks of this process). To be
    closed."""

    def __init__(self, isolation: Isolation, python: str | None = None) -> None:
        self.isolation = isolation
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        worker = os.getpid()
        with theirs, fixed_addresses():
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
        """Run ``source`` with ``stdin``; or call its ``function`` with one JSON argument a line of ``stdin``.

        Raises SandboxError if the sandbox itself failed.
        """
        with contextlib.ExitStack() as stack:
            files = [_memory_file(stack, text) for text in (stdin, "", "", source, "")]
            token = secrets.token_hex(16)
            request = {"limits": asdict(limits), "function": function, "rules": rules, "token": token}
            ending = self._request(json.dumps(request).encode(), files, limits.wall_seconds)
            _, stdout, _, _, report = files
            kind, told = _record(os.pread(report, limits.output_bytes, 0), token)
            printed = os.pread(stdout, limits.output_bytes, 0)
            return _interpret(ending, printed, kind, told, limits, function)

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


def _memory_file(stack: contextlib.ExitStack, text: str) -> int:
    descriptor = os.memfd_create("", os.MFD_CLOEXEC)
    stack.callback(os.close, descriptor)
    data = text.encode(errors="replace")
    while data:
        data = data[os.write(descriptor, data) :]
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor
