"""Finds what this machine gives: an interpreter for programs, and isolation. Sandboxes of every strength, the
strongest first, run a plain program and one that tries to escape; then a command tries.

Programs run in another Python than the trainer's: from 3.12 on, recursion through C functions (``lru_cache``)
ends at a depth of about 500, whatever ``setrecursionlimit`` says.
"""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
from contextlib import closing
from functools import lru_cache
from typing import Literal

from megatron_eqlen.graders.sandbox.client import EMPTY_FOLDER, Command, Sandbox, SandboxError, folder_files
from megatron_eqlen.graders.sandbox.command import CommandLimits
from megatron_eqlen.graders.sandbox.program import Isolation, Limits

OLDEST = (3, 11)
WHO = "import sys; print(sys.implementation.name, '%d.%d.%d' % sys.version_info[:3], sys.executable)"


@lru_cache(maxsize=16)
def find_python(wanted: str) -> str:
    """Return the path of the interpreter ``wanted``, a version or a path. A version is looked for in the
    environment that ``tools/setup programs`` makes, then on the PATH. Raises ValueError if there is none."""
    named = os.sep in wanted
    # ``3.11.4`` is looked for as ``python3.11``, and its own version decides.
    name = "python" + ".".join(wanted.split(".")[:2])
    folders = [f"{sys.prefix}/programs/bin", *os.get_exec_path()]
    places = [path for folder in folders if (path := shutil.which(name, path=folder))]
    seen = []
    for place in [wanted] if named else [*places, sys.executable]:
        version, executable = _ask(place)
        # With a dot behind, so that 3.1 does not fit 3.11.
        fits = named or f"{version}.".startswith(f"{wanted}.")
        if fits and tuple(map(int, version.split(".")[:2])) >= OLDEST:
            return executable
        seen.append(f"{place} ({version})")
    expected = "a path of CPython 3.11 or newer" if named else f"CPython {wanted}"
    hint = "The key may name another, but from 3.12 on many recursive programs fail"
    found = f"{', '.join(seen)}: tools/setup programs installs 3.11. {hint}"
    raise ValueError(f"reward.code_python: expected {expected} for programs to run in, found {found}")


def _ask(place: str) -> tuple[str, str]:
    """Return version and path of the CPython that ``place`` starts, "0" for a version if it starts none."""
    command = [place, "-I", "-c", WHO]
    try:
        told = subprocess.check_output(command, stderr=subprocess.DEVNULL, text=True, timeout=60)
        name, version, executable = told.strip().split(" ", 2)
    except (OSError, ValueError, subprocess.SubprocessError):
        return "0", place
    return version if name == "cpython" else "0", executable


log = logging.getLogger(__name__)

LIMITS = Limits(cpu_seconds=10, wall_seconds=60, memory_mb=512)
HELLO = """\
import os, sys
for folder in sys.prefix, sys.base_prefix, os.path.dirname(os.__file__):
    os.listdir(folder)
print(sum(map(int, input().split())))
"""
"""A program that reads Python's folders, so that it fails if a module could not be imported."""
ESCAPES = """\
import os, socket
attempts = {
    "reads /etc/passwd": lambda: open("/etc/passwd"),
    "writes to a library": lambda: open(os.__file__, "a"),
    "opens a network socket": socket.socket,
    "starts a process": lambda: os.fork() or os._exit(0),
}
for name, act in attempts.items():
    try:
        act()
    except PermissionError:
        continue
    print("a program", name)
"""
"""A program that prints every attempt that was not refused."""
AS_ROOT = " (programs run as root: nobody cannot read the folder of {} or its parents)"


PYTHON = sys.executable
"""The interpreter around commands; they themselves see the system's programs only."""
NO_COMMANDS = (
    "commands need Linux 5.12 with seccomp and namespaces for users who are not root (sysctl "
    "user.max_user_namespaces, kernel.apparmor_restrict_unprivileged_userns; Docker: --security-opt "
    "seccomp=unconfined --security-opt systempaths=unconfined)"
)
COMMAND_ESCAPES = """\
[ ! -e /etc/shadow ] || echo a command sees /etc/shadow
! (: > /etc/escaped) 2> /dev/null || echo a command writes outside its folder
set -- /proc/[0-9]*; [ $# -lt 5 ] || echo a command sees processes of others
[ "$(wc -l < /proc/net/dev)" -lt 4 ] || echo a command sees network interfaces
echo kept > file
"""


@lru_cache(maxsize=1)
def commands_refused() -> str | None:
    """Return the reason why commands cannot be isolated on this machine; None if they can."""
    try:
        with closing(Sandbox(Isolation(True, True, True), PYTHON)) as sandbox:
            limits = CommandLimits(seconds=30, folder_mb=16)
            end = sandbox.command(Command(["sh", "-c", COMMAND_ESCAPES]), EMPTY_FOLDER, limits)
    except SandboxError as error:
        return str(error)
    # Each attempt that succeeds prints a line.
    if end.output or end.status != "ended" or end.unkept:
        return end.output.strip() or end.unkept or end.status
    return None if folder_files(end.folder) == {"file": b"kept\n"} else "what a command writes is lost"


def required_isolation(mode: Literal["strict", "best_effort"], python: str) -> Isolation:
    """Return, and log, this machine's isolation of ``python``. ValueError if ``strict`` asks for more."""
    isolation = offered_isolation(python)
    if not isolation.strict and mode == "strict":
        offer = f"this machine offers {isolation}; code_sandbox: best_effort accepts less"
        raise ValueError(f"reward.code_sandbox: strict needs Landlock and seccomp, {offer}")
    level = logging.WARNING if isolation.as_root or not isolation.strict else logging.INFO
    as_root = AS_ROOT.format(python) if isolation.as_root else ""
    log.log(level, "code sandbox: %s%s", isolation, as_root)
    return isolation


@lru_cache(maxsize=4)
def offered_isolation(python: str) -> Isolation:
    """Return the strongest isolation that works on this machine, tried with programs of ``python``."""
    # Strongest first: both layers, then one; as nobody, then as root where nobody cannot read Python.
    users = (True, False) if os.geteuid() == 0 else (False,)
    layers = ((True, True), (False, True), (True, False), (False, False))
    for isolation in (Isolation(*layer, user) for layer in layers for user in users):
        failure = shortcoming(isolation, python)
        if failure is None:
            return isolation
        log.warning("code sandbox: %s does not work here: %s", isolation, failure)
    raise SandboxError("no program can be run here, not even without isolation")


def shortcoming(isolation: Isolation, python: str | None = None) -> str | None:
    """Return None if programs run and (with strict isolation) cannot escape, else the failure."""
    try:
        with closing(Sandbox(isolation, python)) as sandbox:
            hello = sandbox.run(HELLO, "2 3\n", LIMITS)
            escapes = sandbox.run(ESCAPES, "", LIMITS)
    except SandboxError as error:
        return str(error)
    if hello.stdout != "5\n":
        return f"a plain program fails: {hello.error.strip().rpartition('\n')[2] or hello.status}"
    if not isolation.strict or (escapes.status, escapes.stdout) == ("finished", ""):
        return None
    return escapes.stdout or escapes.error
