"""The clean process that grader workers are forked from.

    trainer ──Popen──► host (imports the grader once, no torch) ──fork──► worker ──fork──► ...

The host forks a worker for every socket that arrives on its stdin. A worker answers one item after the other
with the handler of ``MODULE.make_handler(**OPTIONS)``. The trainer kills a worker that hangs; a new one has
everything imported already. Workers die with the host. The host ends when the trainer is gone, even if
another process holds the socket; its main loop checks that, since a process that forks must have one thread.
"""

from __future__ import annotations

import importlib
import json
import os
import select
import signal
import socket
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from megatron_eqlen.graders.sandbox.kernel import die_with
from megatron_eqlen.processes.failures import name_of
from megatron_eqlen.processes.lifeline import INTERVAL

Item = dict[str, Any]
PACKAGE_ROOT = Path(__file__).resolve().parents[3]


def main() -> None:
    module = importlib.import_module(sys.argv[1])
    options = json.loads(sys.argv[2])
    trainer = int(sys.argv[3])
    # The socket came as stdin, which workers inherit: it moves to another number.
    control = socket.socket(fileno=os.dup(0))
    with open(os.devnull) as null:
        os.dup2(null.fileno(), 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the trainer handles Ctrl-C
    workers: set[int] = set()
    host = os.getpid()
    while os.getppid() == trainer:  # an orphan gets another parent
        if not select.select([control], [], [], INTERVAL)[0]:
            continue
        data, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not data:
            break
        # Reap those that have ended.
        workers -= {pid for pid in workers if os.waitpid(pid, os.WNOHANG)[0]}
        pid = os.fork()
        if pid == 0:
            die_with(host)
            control.close()
            _run_worker(module, options, Connection(descriptors[0]))
        workers.add(pid)
        os.close(descriptors[0])
    for pid in workers:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _run_worker(module: Any, options: dict[str, Any], connection: Connection) -> None:
    """Send the process's number; answer items until the connection closes. Report an exception, then end."""
    try:
        connection.send_bytes(str(os.getpid()).encode())
        handle = module.make_handler(**options)
        while True:
            seconds, item = json.loads(connection.recv_bytes())
            signal.setitimer(signal.ITIMER_PROF, seconds)  # SIGPROF kills it, also in C code
            try:
                answer = handle(item)
            except BaseException as error:
                answer = {"failure": name_of(error)[:500]}
                raise
            finally:
                connection.send_bytes(json.dumps(answer).encode())
    except (EOFError, ConnectionResetError):
        pass
    finally:
        os._exit(0)  # a worker must not run the host's clean-up


def scrubbed_environment() -> dict[str, str]:
    """Return what a grader process may see of the trainer's environment: no token, no key, no rank."""
    return {
        "PATH": os.defpath,
        "LANG": "C.UTF-8",
        "PYTHONPATH": str(PACKAGE_ROOT),
        "PYTHONHASHSEED": "0",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "MALLOC_ARENA_MAX": "1",  # else each thread of a program reserves 64 MiB of its address space
    }


if __name__ == "__main__":
    main()
