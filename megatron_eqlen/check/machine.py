"""GPUs and their interconnect, cores, memory and disk space."""

from __future__ import annotations

import os
import shutil
import socket
import sys
from pathlib import Path

import torch
from torch.cuda import nccl

from megatron_eqlen.check.finding import Check, Finding, Place, gigabytes
from megatron_eqlen.job import Job
from megatron_eqlen.plan.host import checkpoint_bytes, export_bytes
from megatron_eqlen.plan.memory import memory
from megatron_eqlen.plan.sbatch import trainer_bytes
from megatron_eqlen.processes.cores import memory_limit, usable_cores
from megatron_eqlen.recipe import ClusterRecipe, RecipeError

CORES_OF_A_GPU = 2
"""One core for the process that drives a GPU, one for its helpers."""
MOST_ON_A_CORE = 4
"""Most processes per core in a run on CPUs; each has an engine and a trainer that compute."""
SHARED_MEMORY = 1e9
"""Bytes of /dev/shm below which NCCL or a worker may fail: Docker gives 64 MB unless told otherwise."""


def gpus(place: Place) -> Finding:
    """Report number and names of the GPUs; each one multiplies two matrices."""
    if not torch.cuda.is_available():
        todo = "nvidia-smi, a job that asks for GPUs, tools/setup gpu; else cluster.device=cpu"
        built = f"torch {torch.__version__} is for CUDA {torch.version.cuda or '(none)'}"
        return Finding("missing", f"no CUDA device; {built}", todo if place.on_gpus else "")
    count = torch.cuda.device_count()
    # SLURM may have given fewer GPUs than the recipe has processes.
    if place.on_gpus and place.processes > count:
        asked = f"{place.processes} processes a node (cluster.processes_per_node)"
        return Finding("failed", f"{count} GPUs for {asked}", "ask SLURM for as many: --gpus-per-node")
    # A GPU that is listed may still compute wrong numbers.
    for device in range(count):
        if (product := multiplied(torch.device("cuda", device))) != 64.0:
            text = f"GPU {device} computes {product} for 64"
            return Finding("failed", text, "leave the node out; nvidia-smi -q")
    names = {torch.cuda.get_device_properties(device).name for device in range(count)}
    return Finding("ok", f"{count} x {', '.join(sorted(names))}")


def multiplied(device: torch.device) -> float:
    """Return 64 on a device that computes correctly."""
    # Each element of the product is a sum of 64 ones.
    ones = torch.ones(64, 64, device=device)
    return float((ones @ ones).max())


def gpu_memory(place: Place) -> Finding | None:
    """Check that the plan fits these GPUs, and that no other process holds much of their memory."""
    if not torch.cuda.is_available():
        return None
    # (free, total) bytes of each GPU; the smallest decides.
    sizes = [torch.cuda.mem_get_info(device) for device in range(torch.cuda.device_count())]
    free, total = min(size for size, _ in sizes), min(size for _, size in sizes)
    text = f"{gigabytes(free)} free of {gigabytes(total)}"
    if place.recipe is None or not place.on_gpus:
        return Finding("ok", text)
    # The plan for the GPUs that are here, not for the size that the recipe assumes.
    cluster = place.recipe.cluster.model_copy(update={"gpu_memory_gib": total / 2**30})
    need = memory(Job(place.recipe.model_copy(update={"cluster": cluster})))
    text = f"{text}, the plan needs {gigabytes(need.peak)}"
    if problems := need.problems(servers=False):  # which may run on other GPUs
        return Finding("failed", f"{text}: {'; '.join(problems)}", "eqlen plan RECIPE shows what takes it")
    if free < need.peak:
        return Finding("failed", text, "nvidia-smi shows which processes have the rest")
    return Finding("ok", text)


def collectives(place: Place) -> Finding | None:
    """Run an all-reduce with NCCL between all GPUs of this machine."""
    if not torch.cuda.is_available():
        return None
    sums = reduced_by_nccl()
    by = f"NCCL {'.'.join(map(str, nccl.version()))} between {len(sums)} GPUs"
    if {*sums} != {len(sums)}:
        text = f"{by}: a sum of {len(sums)} ones is {sums}"
        return Finding("failed", text, "NCCL_DEBUG=INFO shows the links")
    return Finding("ok", by)


def reduced_by_nccl() -> list[float]:
    """Return the sum of a 1 from each GPU of this machine, as each GPU received it."""
    ones = [torch.ones(1 << 20, device=f"cuda:{number}") for number in range(torch.cuda.device_count())]
    nccl.all_reduce(ones)
    return [float(tensor.max()) for tensor in ones]


def cores(place: Place) -> Finding:
    usable = usable_cores()
    wanted = place.processes * (CORES_OF_A_GPU if place.on_gpus else 1)
    text = f"{usable} for {place.processes} processes"
    if usable < wanted:
        todo = "sbatch --cpus-per-task (cluster.cpus_per_process)"
        return Finding("slow", f"{text}, expected {wanted}", todo)
    return Finding("ok", text)


def refuse_unfit(cluster: ClusterRecipe) -> None:
    """Raise RecipeError where this process may not train or generate in ``cluster``: too few GPUs, or far
    more processes than cores. Print a warning about processes that share cores."""
    count, launched = cluster.processes_per_node, "RANK" in os.environ
    if cluster.device == "gpu":
        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if not gpus:
            remedy = "cluster.device=cpu trains on the processor, which is for tiny models"
            found = f"cluster.device: gpu, found no GPU on {socket.gethostname()} (`eqlen check` says why)"
            raise RecipeError(f"{found}: {remedy}")
        if not launched and gpus < count:  # a rank that was launched may see its own GPU alone
            found = f"{gpus} on {socket.gethostname()}"
            raise RecipeError(f"cluster.processes_per_node: {count} processes need a GPU each, found {found}")
    elif not launched and (cores := usable_cores()) < count:
        text = f"cluster.processes_per_node: {count} processes share {cores} cores"
        if cores * MOST_ON_A_CORE < count:
            raise RecipeError(f"{text}: expected at most {MOST_ON_A_CORE} processes a core")
        print(f"WARNING: {text}: they will wait for each other", file=sys.stderr)


def host_memory(place: Place) -> Finding:
    """Report the memory that the machine, and a cgroup around this process, have free."""
    page = os.sysconf("SC_PAGE_SIZE")
    usable = min(os.sysconf("SC_PHYS_PAGES") * page, memory_limit())
    text = gigabytes(usable)
    if place.job is None or not place.on_gpus:  # the plan counts what lies beside GPUs
        return Finding("ok", text)
    need = trainer_bytes(place.job)
    text = f"{text}, the plan needs {gigabytes(need)}"
    if need > usable:
        return Finding("failed", text, "sbatch --mem, larger nodes, or more of them (eqlen plan RECIPE)")
    return Finding("ok", text)


def shared_memory(place: Place) -> Finding:
    free = shutil.disk_usage("/dev/shm").free
    text = f"{gigabytes(free)} free in /dev/shm"
    if free < SHARED_MEMORY:
        return Finding("failed", text, "docker run --ipc host, or remove old files")
    return Finding("ok", text)


def space(place: Place) -> Finding:
    """Compare the free space, plus what this run already occupies, with all that the run keeps."""
    wanted = place.folder.absolute()
    # The run folder need not exist: the next folder above it is on the same disk.
    folder = next(path for path in (wanted, *wanted.parents) if path.is_dir())
    free = shutil.disk_usage(folder).free
    text = f"{gigabytes(free)} free in {folder}"
    if place.job is None:
        return Finding("ok", text)
    kept = place.job.recipe.checkpoint.keep
    # One more than are kept: the newest is complete before the oldest is removed.
    need = checkpoint_bytes(place.job) * (kept + 1) + export_bytes(place.job)
    has = sum(_size(place.folder / name) for name in ("checkpoints", "export"))
    text += f", checkpoints and export take {gigabytes(need)}"
    text += f" ({gigabytes(has)} are there)" if has else ""
    if free + has < need:
        return Finding("failed", text, "make room, run_dir=... elsewhere, or checkpoint.keep=1")
    return Finding("ok", text)


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


CHECKS = [
    Check("gpus", gpus, needed=lambda place: place.on_gpus),
    Check("gpu memory", gpu_memory),
    Check("collectives", collectives),
    Check("cores", cores),
    Check("memory", host_memory),
    Check("shared memory", shared_memory),
    Check("space", space, of_inputs=True),
]
