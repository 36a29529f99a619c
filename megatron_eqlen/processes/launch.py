"""Start the ranks of a run on one machine; none outlives this process. They meet at a file of this process
(``STORE``), not at torch's rendezvous: its stores listen on all addresses of the machine without a secret,
and ``c10d``'s unpickles what anybody has written there."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, start_processes
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from megatron_eqlen.files import scratch
from megatron_eqlen.processes import failures
from megatron_eqlen.processes.distributed import SECRET, STORE
from megatron_eqlen.processes.failures import Failure
from megatron_eqlen.processes.interrupts import Interrupts, handled
from megatron_eqlen.processes.lifeline import named
from megatron_eqlen.processes.quiet import quiet


def launch(
    processes: int, arguments: list[str], interrupts: Interrupts, module: str = "megatron_eqlen.cli"
) -> int:
    """Run ``python -m MODULE ARGUMENTS`` on local ranks. Print the first failure and return its status."""

    def handle(number: int, _: object) -> None:
        if interrupts.ends(number):
            raise SignalException("", signal.Signals(number))  # ends the wait for the ranks

    for number in handled():
        signal.signal(number, handle)
    quiet()  # again: importing torch's module resets its logger's level
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # Megatron's order of kernels with TP > 1
    # torch installs handlers for these signals, by default over ours: leave it SIGQUIT alone.
    os.environ |= named() | {SECRET: secrets.token_hex(), "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGQUIT"}
    folder = scratch("ranks")
    try:
        world = str(processes)
        everyone = {"WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, STORE: f"{folder}/store"}
        ranks = range(processes)
        started = start_processes(
            "ranks",
            sys.executable,
            args=dict.fromkeys(ranks, ("-m", module, *arguments)),
            envs={rank: {"RANK": str(rank), "LOCAL_RANK": str(rank), **everyone} for rank in ranks},
            logs_specs=DefaultLogsSpecs(log_dir=folder),
        )
        try:
            ended = started.wait(period=0.5)
        except SignalException as error:
            # Ranks get the signal, and SIGKILL after 5 s.
            started.close(error.sigval, timeout=5)
            return 128 + error.sigval
        if ended is not None and ended.is_failed():
            return _report(ended.failures, failures.read(Path(folder)), processes)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return 0


def _report(ended: Mapping[int, ProcessFailure], recorded: list[Failure], processes: int) -> int:
    """Print the first failure of the ranks that have ``ended`` or ``recorded`` a cause; return its status."""
    reported = {failure.rank for failure in recorded}
    here = socket.gethostname()
    # Of ranks that recorded nothing, because they were killed or crashed in C, only the end is known.
    silent = [  # timestamps are whole seconds, after the end
        Failure(rank, here, _describe_end(process), process.timestamp + 1.0)
        for rank, process in ended.items()
        if rank not in reported
    ]
    first = failures.first([*recorded, *silent])
    alone = first.rank is None or processes == 1
    others = "" if alone else f" (and with it ended the other {processes - 1})"
    print(f"{first.traceback}eqlen: {first}{others}", file=sys.stderr)
    statuses = {rank: process.exitcode for rank, process in ended.items()}
    # A killed rank has a negative exit code.
    return max(1, statuses[first.rank] if first.rank in statuses else max(statuses.values()))


def _describe_end(process: ProcessFailure) -> str:
    """Return how a process ended that has recorded no cause."""
    if process.exitcode >= 0:
        return f"it ended with status {process.exitcode}"
    memory = ", as the kernel does where memory runs out" if process.exitcode == -signal.SIGKILL else ""
    return f"it was killed by {process.signal_name()}{memory}"
