"""Runs inside a sandboxed process: gives up every right, then runs a program and reports how it ended.

    zygote ──fork──► enter() ──► limits, uid, Landlock, seccomp ──► run() ──► report descriptor

The program may forge the report, which its own process writes. It is trusted only as an answer: what was
printed or returned is compared elsewhere, with expected outputs that this process never saw.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import io
import os
import resource
import signal
import sys
import threading
import traceback
import types
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

from megatron_eqlen.graders.code.rules import Rules, call
from megatron_eqlen.graders.sandbox import kernel
from megatron_eqlen.graders.sandbox.seccomp import build_filter, machine_calls, restrict_system_calls

SOURCE, REPORT, NULL = 3, 4, 5
"""File descriptors of the program's text, the report and /dev/null."""
DEVICES = {b"/dev/null": NULL, b"/dev/stdout": 1, b"/dev/stderr": 2}
NOBODY = 65534
"""The user id of programs and commands where the sandbox runs as root."""
SYSTEM_PATHS = ("/usr/lib", "/usr/lib64", "/usr/local/lib", "/usr/share/zoneinfo", "/lib", "/lib64")
SYSTEM_FILES = ("/etc/ld.so.cache", "/etc/localtime", "/dev/null", "/dev/zero", "/dev/urandom")
STACK_BYTES = 256 << 20
REPORT_TEXT = 1000
"""Characters of an error that are reported."""


@dataclass(frozen=True)
class Isolation:
    """Isolation of a program, besides resource limits."""

    landlock: bool
    seccomp: bool
    drop_user: bool
    """Run as nobody (needs root, and Python's folder readable by others)."""

    @property
    def strict(self) -> bool:
        return self.landlock and self.seccomp

    @property
    def as_root(self) -> bool:
        return os.geteuid() == 0 and not self.drop_user

    def __str__(self) -> str:
        parts = ["rlimits"] + [name for name in ("landlock", "seccomp") if getattr(self, name)]
        user = ["nobody"] * self.drop_user + ["root without capabilities"] * self.as_root
        return " + ".join(parts + user)


@dataclass(frozen=True)
class Limits:
    cpu_seconds: float
    wall_seconds: float
    memory_mb: int
    output_bytes: int = 16 << 20
    """Bytes of standard output, of standard error, and of any file; more where a test expects more."""


def enter(limits: Limits, isolation: Isolation, zygote: int) -> None:
    """Give up every right, and die with the process ``zygote``."""
    os.setsid()
    os.chdir("/proc")  # nobody can make a file there, and Landlock keeps programs from reading it
    os.umask(0o077)
    # Python ignores SIGXFSZ by default, and too much output would look like an error
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _limit_resources(limits, isolation)
    if isolation.drop_user and os.geteuid() == 0:
        become(NOBODY)
    kernel.drop_capabilities()
    kernel.die_with(zygote)  # after the change of user, which would reset it
    kernel.prctl(kernel.SET_DUMPABLE, 0)
    if isolation.landlock:
        python = {sys.prefix, sys.base_prefix, os.path.dirname(os.__file__)}
        kernel.restrict_files([*SYSTEM_PATHS, *SYSTEM_FILES, *python])
    if isolation.seccomp:
        restrict_system_calls(build_filter(machine_calls(), os.getpid()))


def _limit_resources(limits: Limits, isolation: Isolation) -> None:
    memory = limits.memory_mb << 20
    limit(
        {
            resource.RLIMIT_CORE: 0,
            resource.RLIMIT_CPU: max(1, round(limits.cpu_seconds + 0.5)),
            resource.RLIMIT_AS: memory,
            resource.RLIMIT_DATA: memory,
            resource.RLIMIT_FSIZE: limits.output_bytes,
            resource.RLIMIT_NOFILE: 64,
            resource.RLIMIT_MEMLOCK: 0,
        }
    )
    # Programs raise it themselves, as contests allow; the memory limit bounds the stack, too.
    stack = resource.getrlimit(resource.RLIMIT_STACK)[1]
    # No limit is -1, which modulo 2^64 is the largest number.
    resource.setrlimit(resource.RLIMIT_STACK, (min(STACK_BYTES, stack % (1 << 64)), stack))
    # RLIMIT_NPROC counts all of the user's threads, so it cannot be low; with seccomp it is not needed
    if not isolation.seccomp:
        limit({resource.RLIMIT_NPROC: 256 if isolation.drop_user else 4096})


def limit(limits: dict[int, int]) -> None:
    """Set limits; lower ones that are already there stay."""
    for kind, value in limits.items():
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))


def become(user: int) -> None:
    """Take a user id for good. Raises PermissionError unless this process is root."""
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)


def run(function: str | None, rules: Rules, token: str) -> NoReturn:
    """Run the program at SOURCE as ``__main__``, or call its ``function`` on stdin's arguments; then exit."""
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = main
    sys.argv = ["solution.py"]
    os.environ.clear()
    sys.stdin = sys.__stdin__ = _text_file(0, "r")
    sys.stdout = sys.__stdout__ = _text_file(1, "w")
    sys.stderr = sys.__stderr__ = _text_file(2, "w")
    atexit._clear()  # drop the worker's exit functions
    _allow_devices()
    status, leave = 1, os._exit  # the program may put another in its place
    try:
        with open(SOURCE, "rb") as file:
            source = file.read()
        status = _execute(source, main, function, rules, token)
    finally:
        leave(status)  # always: the program must never return into the code that called us


def _allow_devices() -> None:
    """Let Python open /dev/null, stdout and stderr for writing, which the filter, blind to paths, refuses."""
    open_file, open_descriptor, dup = io.open, os.open, os.dup

    def open_with_devices(file: Any, *arguments: Any, **options: Any) -> Any:
        if (descriptor := _device(file)) is not None:
            # ``open`` with this opener gets a copy of a descriptor that is open already.
            options["opener"] = lambda *_: dup(descriptor)
        return open_file(file, *arguments, **options)

    def open_descriptor_with_devices(path: Any, *arguments: Any, **options: Any) -> int:
        descriptor = _device(path)
        return open_descriptor(path, *arguments, **options) if descriptor is None else dup(descriptor)

    builtins.open = io.open = open_with_devices
    os.open = open_descriptor_with_devices


def _device(path: Any) -> int | None:
    return DEVICES.get(os.fsencode(path)) if isinstance(path, str | bytes | os.PathLike) else None


def _text_file(descriptor: int, mode: Literal["r", "w"]) -> io.TextIOWrapper:
    return open(descriptor, mode, encoding="utf-8", errors="replace", closefd=False)


def _execute(source: bytes, main: types.ModuleType, function: str | None, rules: Rules, token: str) -> int:
    """Run the program; return its exit status. Any exception it raises is an error of the program's."""
    stage = "compile_error"
    try:
        code = compile(source, "solution.py", "exec", dont_inherit=True)
        stage = "runtime_error"
        result = call(main, code, function, rules)
        if result is None:
            _finish(main)
        else:
            _report(token, "result", result)
    except SystemExit as end:
        _finish(main)
        # LiveCodeBench's checker counts any ``sys.exit`` as an end in order.
        if rules == "livecodebench":
            return 0
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException as error:  # noqa: BLE001 - the program's, whatever it is
        stage = "memory_limit" if isinstance(error, MemoryError) else stage
        own = error.__traceback__
        while own and own.tb_frame.f_code.co_filename != "solution.py":  # the traceback begins in the program
            own = own.tb_next
        text = "".join(traceback.format_exception(type(error), error, own, limit=-3))
        _report(token, stage, text[-REPORT_TEXT:])
        return 1
    return 0


def _finish(main: types.ModuleType) -> None:
    """Do what the interpreter does when it ends: wait for threads, run exit functions, let go of names
    (a file that nothing holds writes what it has), flush."""
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    atexit._run_exitfuncs()
    main.__dict__.clear()
    for stream in (sys.stdout, sys.__stdout__):
        if stream is not None:
            with contextlib.suppress(ValueError):  # closed or detached
                stream.flush()


def _report(token: str, kind: str, text: str) -> None:
    """Tell the worker how the program ended, behind a token that the program was not given."""
    data = f"{token} {kind}\n{text}".encode(errors="replace")
    while data:
        data = data[os.write(REPORT, data) :]
