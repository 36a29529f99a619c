"""Processor cores and memory that this process may use, given the scheduler, the container and SLURM."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath

PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")


def share_cores() -> None:
    """Let OpenMP's threads spin 1,000 times while they wait for each other, then sleep: GNU's 300,000 times
    are most of the time on cores that others use, too. Call before torch is imported; child processes
    inherit it."""
    if "OMP_WAIT_POLICY" not in os.environ:  # a spin count would win
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")


def cores_per_rank(ranks_on_node: int, environ: Mapping[str, str] = os.environ) -> int:
    """Return the cores of one rank if ``ranks_on_node`` ranks share the node; at least 1.
    ``SLURM_CPUS_PER_TASK`` is of a task: a rank (srun) or the launcher of several (torchrun)."""
    # Equal shares of the node, unless SLURM says how many cores a task has.
    share = usable_cores() // ranks_on_node
    if (task := environ.get("SLURM_CPUS_PER_TASK", "")).isdecimal():
        # SLURM writes 8(x2),4 for 8 tasks on each of two nodes and 4 on a third
        tasks = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE") or "1"
        ranks_in_task = -(-ranks_on_node // max(int(part.partition("(")[0]) for part in tasks.split(",")))
        share = min(usable_cores(), int(task)) // ranks_in_task
    return max(1, share)


def usable_cores() -> int:
    """Return the cores of this process's affinity or of its cgroup quota, whichever is less; at least 1."""
    return max(1, min([len(os.sched_getaffinity(0)), *(int(quota) for quota in cgroup_quotas())]))


def memory_limit(proc: Path = PROC, cgroups: Path = CGROUPS) -> float:
    """Return the bytes that the cgroups of this process allow (version 2 and 1); infinite without a limit."""
    limits = [
        int(text)
        for folder in _cgroup_folders("memory", proc, cgroups)
        for name in ("memory.max", "memory.limit_in_bytes")
        if (file := folder / name).is_file() and (text := file.read_text().strip()) != "max"
    ]
    return min(limits, default=math.inf)


def cgroup_quotas(proc: Path = PROC, cgroups: Path = CGROUPS) -> Iterator[float]:
    """Yield the quotas in cores of this process's cgroup and its parents (version 2 and 1)."""
    return filter(None, map(_quota, _cgroup_folders("cpu", proc, cgroups)))


def _cgroup_folders(controller: str, proc: Path, cgroups: Path) -> Iterator[Path]:
    """Yield the folders of this process's cgroup with ``controller`` and of its parents."""
    file = proc / "self" / "cgroup"
    for line in file.read_text().splitlines() if file.is_file() else ():  # missing: a kernel without cgroups
        # ``0::/system.slice/slurm`` (version 2), or ``4:cpu,cpuacct:/slurm/job_7`` for some controllers (1).
        _, controllers, path = line.split(":", 2)
        root = cgroups if not controllers else cgroups / controllers
        if controllers and controller not in controllers.split(","):
            continue
        # A limit of any parent holds, too.
        for folder in (PurePosixPath(path), *PurePosixPath(path).parents):
            yield root / folder.relative_to("/")


def _quota(folder: Path) -> float | None:
    """Return the quota in cores; None without one, or if the folder is hidden (the container's root)."""
    if (both := folder / "cpu.max").is_file():
        # ``400000 100000``: microseconds of computation in a period, 4 cores; ``max 100000``: no limit.
        quota, period = both.read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    if (quota_file := folder / "cpu.cfs_quota_us").is_file():
        quota = int(quota_file.read_text())
        # -1: no limit.
        return None if quota < 0 else quota / int((folder / "cpu.cfs_period_us").read_text())
    return None
