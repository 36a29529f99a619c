"""The process that programs are forked from: it locks each one down, waits for it and cleans up behind it.

It runs in the programs' interpreter: it and what it imports need Python 3.11 and the standard library alone.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import signal
import socket
import time
from itertools import pairwise

from megatron_eqlen.graders.sandbox import command, program
from megatron_eqlen.graders.sandbox.command import CommandLimits
from megatron_eqlen.graders.sandbox.kernel import SET_CHILD_SUBREAPER, die_with, prctl
from megatron_eqlen.graders.sandbox.program import Isolation, Limits

CONNECTION = 3
"""Descriptor of the socket of a zygote that was started, not forked."""
LARGEST_REQUEST = 4096
MOST_THREADS = 256
"""Threads a program may have at once. No filter counts them, and RLIMIT_NPROC counts all of the user's."""
WATCH_SECONDS = 0.01
"""Seconds between two looks at the number of threads."""


def main(isolation: str, worker: str) -> None:
    """Serve the socket CONNECTION of the process ``worker``. Import NumPy, if any, once for all programs."""
    # Programs inherit the module, and need not spend their CPU time on it.
    with contextlib.suppress(ImportError):
        import numpy.random  # noqa: F401
    serve(socket.socket(fileno=CONNECTION), Isolation(**json.loads(isolation)), int(worker))


def serve(connection: socket.socket, isolation: Isolation, worker: int) -> None:
    """Run the zygote: a fork for each request, until the worker ends. The fork reads the request, so every
    program inherits the memory of a process that has served none: equal programs find equal addresses."""
    zygote = os.getpid()
    try:
        alive = os.pidfd_open(worker)
    except ProcessLookupError:
        os._exit(0)
    # do not keep the worker's open
    for before, after in pairwise(sorted({2, connection.fileno(), alive, 1 << 16})):
        os.closerange(before + 1, after)
    while True:
        if (server := os.fork()) == 0:
            try:
                _serve_one(connection, isolation, alive, zygote)
            finally:
                os._exit(1)
        if os.waitpid(server, 0)[1]:
            os._exit(0)


def _serve_one(connection: socket.socket, isolation: Isolation, worker: int, parent: int) -> None:
    """Wait for a request, then fork, wait, clean up, answer and exit with status 0. Return if none comes: a
    fork of a worker that has ended may keep the socket open."""
    die_with(parent)
    prctl(SET_CHILD_SUBREAPER, 1)  # processes that a program leaves behind become our children
    if worker in select.select([connection, worker], [], [])[0]:
        return
    # Five memory files come along with the request.
    request, descriptors, _, _ = socket.recv_fds(connection, LARGEST_REQUEST, 5)
    if not request:
        return
    asked = json.loads(request)
    limits = (CommandLimits if asked["command"] else Limits)(**asked["limits"])
    started = time.monotonic()
    ready, told = os.pipe()
    zygote = os.getpid()  # a program that asked for its parent might find this process gone already
    if (pid := os.fork()) == 0:
        told = _placed(descriptors, told)
        with command.refusing(told):  # what fails before the program starts is the sandbox's failure
            if isinstance(limits, CommandLimits):
                command.run(limits, told, zygote)
            program.enter(limits, isolation, zygote)
        os.close(told)
        program.run(asked["function"], asked["rules"], asked["token"])
    os.close(told)
    ending = _wait(pid, started + limits.wall_seconds, connection, worker)
    refused = os.read(ready, 500).decode(errors="replace")
    ending["wall"] = time.monotonic() - started
    command.kill_children()  # what a run left behind: nothing, under seccomp
    connection.send(json.dumps({"failed": refused} if refused else ending).encode())
    os._exit(0)


def _placed(descriptors: list[int], pipe: int) -> int:
    """Give a request's descriptors, /dev/null and ``pipe`` their numbers; close others. Return ``pipe``'s."""
    last = program.NULL + 1
    sources = (*descriptors, os.open(os.devnull, os.O_RDWR), pipe)
    # Above all targets first: a source may have the number that another one is to get.
    copies = [fcntl.fcntl(source, fcntl.F_DUPFD, last + 1) for source in sources]
    for target, descriptor in zip([*range(len(descriptors)), program.NULL, last], copies, strict=True):
        os.dup2(descriptor, target)
    os.closerange(last + 1, 1 << 12)
    return last


def _wait(pid: int, deadline: float, connection: socket.socket, worker: int) -> dict:
    """Wait for the end of the program or ``worker`` (pidfd), or a limit on time or threads; then kill it."""
    tasks = os.open(f"/proc/{pid}/task", os.O_RDONLY)
    process = os.pidfd_open(pid)
    poll = select.poll()
    poll.register(process, select.POLLIN)
    poll.register(worker, select.POLLIN)
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
    # The group, then the process, which may have no group of its own yet.
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError):
            kill(pid, signal.SIGKILL)
    _, status, usage = os.wait4(pid, 0)
    return {
        "exit": os.waitstatus_to_exitcode(status),
        "cpu": usage.ru_utime + usage.ru_stime,
        "timed_out": timed_out,
        "crowded": crowded,
    }
