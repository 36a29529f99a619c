"""Finds the isolation that this machine gives: programs that try to escape run in sandboxes of every
strength.

An attempt that succeeds does no harm: signals are number 0, and owners are set, but nothing that would signal
them is armed.
"""

from __future__ import annotations

import logging
import os
from dataclasses import replace

from megatron_eqlen.rewards.sandbox.client import MOST_THREADS, Execution, Sandbox, SandboxError
from megatron_eqlen.rewards.sandbox.kernel import abi_version
from megatron_eqlen.rewards.sandbox.program import Isolation, Limits

log = logging.getLogger(__name__)

LIMITS = Limits(cpu_seconds=10, wall_seconds=60, memory_mb=512)
ROOMY = replace(LIMITS, memory_mb=1 << 16)
"""Limits that leave addresses for the stacks of many threads."""
HELLO = """\
import os, sys
for folder in sys.prefix, sys.base_prefix, os.path.dirname(os.__file__):
    os.listdir(folder)
print(sum(map(int, input().split())))
"""
"""A program that reads Python's folders, so that every module can be imported, also ones not yet in
memory."""
ESCAPES = """\
import ctypes, fcntl, os, resource, socket
libc = ctypes.CDLL(None, use_errno=True)
parent = os.getppid()
ready, told = os.pipe()
x86 = os.uname().machine == "x86_64"
def kernel(result):
    if result < 0:
        raise OSError(ctypes.get_errno(), "")
def call(number, *arguments):
    kernel(libc.syscall(number, *arguments, *[0] * (6 - len(arguments))))
def ioctl(request):
    fcntl.ioctl(ready, request, (1).to_bytes(4, "little"))
def raise_limit():
    limit = resource.getrlimit(resource.RLIMIT_CPU)[1]
    try:
        resource.setrlimit(resource.RLIMIT_CPU, (limit + 1, limit + 1))
    except ValueError:
        raise PermissionError from None
attempts = {
    "reads the root folder": lambda: os.listdir("/"),
    "reads /proc": lambda: os.listdir("/proc"),
    "reads its parent": lambda: open(f"/proc/{parent}/environ").read(),
    "reads /etc/passwd": lambda: open("/etc/passwd").read(),
    "writes here": lambda: open("escaped", "w"),
    "writes to a library": lambda: open(os.__file__, "a"),
    "opens a network socket": lambda: socket.socket(),
    "opens a local socket": lambda: socket.socket(socket.AF_UNIX),
    "starts a process": lambda: os.fork() or os._exit(0),
    "starts a program": lambda: os.posix_spawn("/bin/true", ["true"], {}),
    "raises its limits": raise_limit,
    "becomes root": lambda: os.setuid(0),
    "enters a namespace": lambda: kernel(libc.unshare(0x10000000)),
    "traces its parent": lambda: kernel(libc.ptrace(16, parent, 0, 0)),
    "signals its parent": lambda: os.kill(parent, 0),
    "signals a parent's thread": lambda: call(234 if x86 else 131, parent, parent, 0),
    "queues a signal": lambda: call(129 if x86 else 138, parent, 0, bytes(128)),
    "signals a process's descriptor": lambda: call(424, 0, 0),
    "signals by fcntl F_SETOWN": lambda: fcntl.fcntl(ready, 8, parent),
    "signals by fcntl F_SETOWN_EX": lambda: fcntl.fcntl(ready, 15, bytes(8)),
    "signals by fcntl F_SETSIG": lambda: fcntl.fcntl(ready, 10, 9),
    "signals by fcntl O_ASYNC": lambda: fcntl.fcntl(ready, fcntl.F_SETFL, 0x2000),
    "signals by fcntl F_SETLEASE": lambda: fcntl.fcntl(0, 1024, 0),
    "signals by fcntl F_NOTIFY": lambda: fcntl.fcntl(0, 1026, 0),
    "signals by ioctl FIOASYNC": lambda: ioctl(0x5452),
    "signals by ioctl FIOSETOWN": lambda: ioctl(0x8901),
    "signals by ioctl SIOCSPGRP": lambda: ioctl(0x8902),
    "signals by prctl PR_SET_PDEATHSIG": lambda: kernel(libc.prctl(1, 9, 0, 0, 0)),
    "signals by a timer": lambda: call(222 if x86 else 107, 0, 0, 0),
    "signals by a message queue": lambda: call(244 if x86 else 184, 0, 0),
    "signals by a poisoned page": lambda: call(28 if x86 else 233, 0, 0, 100),
    "submits input and output": lambda: call(206 if x86 else 0, 0, 0),
    "sets up io_uring": lambda: call(425, 1, 0),
    "counts events": lambda: call(298 if x86 else 241, 0, 0, 0, 0, 0),
    "handles page faults": lambda: call(282 if x86 else 74, 0),
    "loads a kernel program": lambda: call(321 if x86 else 280, 0, 0, 0),
    "adds a key": lambda: call(248 if x86 else 217, 0, 0, 0, 0, 0),
}
for name, act in attempts.items():
    try:
        act()
    except (PermissionError, FileNotFoundError):
        continue
    except OSError as error:
        name += f" ({error.strerror})"
    print("a program", name)
"""
"""A program that prints every call that was not refused. A call with meaningless arguments counts if it
reaches the kernel."""

THREADS = f"""\
import threading, time
threading.stack_size(1 << 16)
for _ in range({2 * MOST_THREADS}):
    threading.Thread(target=time.sleep, args=(5,), daemon=True).start()
time.sleep(5)
"""
"""A program that starts too many threads and finishes only if nobody counts them."""


def probe() -> Isolation:
    """Return the strongest isolation that works here, tried with real programs. It may be less than
    strict."""
    root = os.geteuid() == 0
    wishes = [Isolation(True, True, drop) for drop in ((True, False) if root else (False,))]
    wishes += [
        Isolation(False, True, root),
        Isolation(abi_version() > 0, False, root),
        Isolation(False, False, root),
    ]
    wishes.append(Isolation(False, False, False))
    for wish in wishes:
        failure = shortcoming(wish)
        if failure is None:
            return wish
        log.warning("code sandbox: %s does not work here: %s", wish, failure)
    raise SandboxError("no program can be run here, not even without isolation")


def shortcoming(isolation: Isolation) -> str | None:
    """Return None if programs run and (with strict isolation) cannot escape, else the failure."""
    try:
        with Sandbox(isolation) as sandbox:
            hello = sandbox.run(HELLO, "2 3\n", LIMITS)
            escapes = sandbox.run(ESCAPES, "", LIMITS) if isolation.strict else Execution("finished")
            threads = sandbox.run(THREADS, "", ROOMY).status if isolation.strict else ""
    except SandboxError as error:
        return str(error)
    if hello.stdout != "5\n":
        return f"a plain program fails: {hello.error or hello.status}"
    if threads == "finished":
        return f"a program starts more than {MOST_THREADS} threads"
    return escapes.stdout or (None if escapes.status == "finished" else escapes.error)


if __name__ == "__main__":
    print(probe())
