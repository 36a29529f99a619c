"""Cores: how many a rank's graders get from scheduler, container and SLURM, and how its threads wait."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_eqlen.processes import cores
from megatron_eqlen.processes.cores import cgroup_quotas, cores_per_rank, memory_limit, usable_cores

NAMES = "OMP_WAIT_POLICY", "GOMP_SPINCOUNT"


@pytest.fixture
def machine(monkeypatch):
    """Simulate a machine that leaves this process that many cores."""

    def have(affinity: int, *quotas: float) -> None:
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(affinity)))
        monkeypatch.setattr(cores, "cgroup_quotas", lambda: iter(quotas))

    return have


@pytest.mark.parametrize(("affinity", "quotas", "usable"), [
    (96, [], 96), (96, [12.0], 12), (4, [12.0], 4), (96, [12.0, 2.5], 2), (8, [0.5], 1),
])  # fmt: skip
def test_a_container_may_use_fewer_cores_than_the_machine_has(machine, affinity, quotas, usable):
    machine(affinity, *quotas)
    assert usable_cores() == usable


@pytest.mark.parametrize(("affinity", "ranks", "slurm", "each"), [
    (96, 8, {}, 12),
    (2, 8, {}, 1),
    (96, 8, {"CPUS_PER_TASK": "64", "TASKS_PER_NODE": "1(x4)"}, 8),  # one torchrun a node
    (96, 8, {"CPUS_PER_TASK": "12", "TASKS_PER_NODE": "8(x4)"}, 12),  # a task is a rank, seen unbound
    (12, 8, {"CPUS_PER_TASK": "12", "TASKS_PER_NODE": "8(x4)"}, 12),  # and bound to its cores
    (96, 8, {"CPUS_PER_TASK": "6", "TASKS_PER_NODE": "1", "STEP_TASKS_PER_NODE": "8(x3),4"}, 6),
    (96, 4, {"CPUS_PER_TASK": "64", "TASKS_PER_NODE": "2(x2)"}, 32),
    (16, 1, {"CPUS_PER_TASK": "32"}, 16),
    (16, 4, {"CPUS_PER_TASK": "2", "TASKS_PER_NODE": "1"}, 1),
])  # fmt: skip
def test_ranks_share_a_node_or_a_slurm_task(machine, affinity, ranks, slurm, each):
    machine(affinity)
    assert cores_per_rank(ranks, {f"SLURM_{name}": value for name, value in slurm.items()}) == each


def write(files: dict[Path, str]) -> None:
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_quotas_of_the_cgroups_around_a_process_count_in_both_versions(tmp_path):
    proc, cgroups = tmp_path / "proc", tmp_path / "cgroup"
    files = {
        proc / "self/cgroup": "3:cpu,cpuacct:/job/step\n2:memory:/elsewhere\n0::/slice/pod\n",
        cgroups / "slice/pod/cpu.max": "max 100000\n",
        cgroups / "slice/cpu.max": "250000 100000\n",
        cgroups / "cpu,cpuacct/job/step/cpu.cfs_quota_us": "-1\n",
        cgroups / "cpu,cpuacct/cpu.cfs_quota_us": "600000\n",
        cgroups / "cpu,cpuacct/cpu.cfs_period_us": "100000\n",
        cgroups / "memory/elsewhere/cpu.max": "1 100000\n",
    }
    write(files)
    assert sorted(cgroup_quotas(proc, cgroups)) == [2.5, 6.0]
    assert list(cgroup_quotas(tmp_path / "none", cgroups)) == []


def test_the_least_memory_limit_of_the_cgroups_around_a_process_counts(tmp_path):
    proc, cgroups = tmp_path / "proc", tmp_path / "cgroup"
    assert memory_limit(proc, cgroups) == float("inf")
    files = {
        proc / "self/cgroup": "2:memory:/job/step\n0::/slice/pod\n",
        cgroups / "slice/pod/memory.max": "max\n",
        cgroups / "slice/memory.max": "3000\n",
        cgroups / "memory/job/step/memory.limit_in_bytes": "9223372036854771712\n",
        cgroups / "memory/job/memory.limit_in_bytes": "2000\n",
    }
    write(files)
    assert memory_limit(proc, cgroups) == 2000


@pytest.mark.parametrize(("asked", "spins"), [
    ({}, "GOMP_SPINCOUNT = '1000'"),
    ({"GOMP_SPINCOUNT": "7"}, "GOMP_SPINCOUNT = '7'"),
    ({"OMP_WAIT_POLICY": "PASSIVE"}, "GOMP_SPINCOUNT = '0'"),
])  # fmt: skip
def test_threads_that_wait_soon_leave_their_core_to_others_unless_the_user_says_otherwise(asked, spins):
    """GNU's OpenMP prints its settings when torch loads it."""
    script = "from megatron_eqlen import main; print(main(['report', 'no/run'])); import torch"
    environ = {name: value for name, value in os.environ.items() if name not in NAMES}
    environ |= {"OMP_DISPLAY_ENV": "VERBOSE"} | asked
    command = [sys.executable, "-c", script]
    ended = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
    assert ended.stdout == "2\n", "a command has begun, and has found no run"
    assert spins in ended.stderr
