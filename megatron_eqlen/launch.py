"""Starts this machine's ranks with torch's elastic agent, and sees that none outlives it."""

from __future__ import annotations

import os
import sys

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from megatron_eqlen.lifeline import named


def launch(processes: int, arguments: list[str]) -> int:
    """Run ``eqlen ARGUMENTS`` on ``processes`` ranks of this machine; returns the first failure's status."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.update(named())
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=processes,
        run_id=f"eqlen-{os.getpid()}",
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        max_restarts=0,
        monitor_interval=0.5,
    )
    try:
        elastic_launch(config, sys.executable)("-m", "megatron_eqlen.cli", *arguments)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        print(f"eqlen: rank {rank} ended with status {failure.exitcode}; see above", file=sys.stderr)
        return failure.exitcode if failure.exitcode > 0 else 1
    return 0
