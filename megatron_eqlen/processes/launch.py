"""Start this machine's ranks with torch's elastic agent; no rank outlives it."""

from __future__ import annotations

import os
import signal
import socket
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from megatron_eqlen.processes import failures
from megatron_eqlen.processes.failures import Failure
from megatron_eqlen.processes.interrupts import Interrupts, handled
from megatron_eqlen.processes.lifeline import named
from megatron_eqlen.processes.quiet import quiet


def launch(
    processes: int, arguments: list[str], interrupts: Interrupts, module: str = "megatron_eqlen.cli"
) -> int:
    """Run ``python -m MODULE ARGUMENTS`` on ``processes`` ranks of this machine. Print the first failure and
    return its status."""

    def handle(number: int, _: object) -> None:
        if interrupts.ends(number):
            raise SignalException("", signal.Signals(number))  # makes torch's agent end the ranks

    for number in handled():
        signal.signal(number, handle)
    quiet()  # again: importing the agent's module resets its logger's level
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:  # PYTORCH_ALLOC_CONF would win
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    os.environ.update(named())
    with tempfile.TemporaryDirectory(prefix="eqlen-") as folder:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=processes,
            run_id=f"eqlen-{os.getpid()}",
            rdzv_backend="c10d",
            rdzv_endpoint="127.0.0.1:0",
            max_restarts=0,
            monitor_interval=0.5,
            logs_specs=DefaultLogsSpecs(log_dir=folder),
            signals_to_handle="SIGQUIT",
            shutdown_timeout=5,
        )
        try:
            elastic_launch(config, sys.executable)("-m", module, *arguments)
        except ChildFailedError as error:
            return _report(error.failures, failures.read(Path(folder)), processes)
        except SignalException as error:
            return 128 + error.sigval
    return 0


def _report(ended: Mapping[int, ProcessFailure], recorded: list[Failure], processes: int) -> int:
    """Print the first failure of the ranks that have ``ended`` or ``recorded`` a cause; return its status."""
    reported = {failure.rank for failure in recorded}
    here = socket.gethostname()
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
    return max(1, statuses[first.rank] if first.rank in statuses else max(statuses.values()))


def _describe_end(process: ProcessFailure) -> str:
    """Return how a process ended that has recorded no cause."""
    if process.exitcode >= 0:
        return f"it ended with status {process.exitcode}"
    memory = ", as the kernel does where memory runs out" if process.exitcode == -signal.SIGKILL else ""
    return f"it was killed by {process.signal_name()}{memory}"
