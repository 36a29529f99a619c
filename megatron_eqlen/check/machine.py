"""Cores, memory, disk, and the other machines of a job."""

from __future__ import annotations

import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage] (documented)

from megatron_eqlen.check.finding import Check, Finding, Place, gigabytes
from megatron_eqlen.plan.host import checkpoint_bytes, export_bytes
from megatron_eqlen.plan.model import model_config
from megatron_eqlen.plan.sbatch import trainer_bytes
from megatron_eqlen.processes.cores import memory_limit, usable_cores
from megatron_eqlen.recipe import Recipe, RecipeError

MEET = "EQLEN_MEET"
"""Environment variable, HOST:PORT: where the tasks of a SLURM step meet."""
CORES_OF_A_GPU = 2
"""One core for the process that drives a GPU, one for its helpers."""
MOST_ON_A_CORE = 4
"""Most processes per core in a run on CPUs; each has an engine and a trainer that compute."""
SHARED_MEMORY = 1e9
"""Bytes of /dev/shm below which NCCL or a worker may fail: Docker gives 64 MB unless told otherwise."""
SLOW_DISK = 100e6
"""Bytes per second below which a disk is called slow."""
SAMPLE, SHORT_SAMPLE = 256 << 20, 32 << 20
"""Number of bytes written."""
CLOCKS = 1.0
"""Largest difference of the machines' clocks in seconds; one table holds times of several machines."""
MEETING = timedelta(seconds=120)


def cores(place: Place) -> Finding:
    usable = usable_cores()
    wanted = place.processes * (CORES_OF_A_GPU if place.on_gpus else 1)
    text = f"{usable} for {place.processes} processes"
    if usable < wanted:
        return Finding(
            "slow", f"{text}, expected {wanted}", "sbatch --cpus-per-task (cluster.cpus_per_process)"
        )
    return Finding("ok", text)


def refuse_unfit(recipe: Recipe) -> None:
    """Raise RecipeError where this process may not train or generate for ``recipe``: it asks for GPUs and
    finds too few, or for many times as many processes as there are cores. Print a warning about processes
    that share cores."""
    count, launched = recipe.cluster.processes_per_node, "RANK" in os.environ
    if recipe.cluster.device == "gpu":
        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if not gpus:
            raise RecipeError(
                f"cluster.device: gpu, found no GPU on {socket.gethostname()} (`eqlen check` says why): "
                f"cluster.device=cpu trains on the processor, which is for tiny models"
            )
        if not launched and gpus < count:  # a rank that was launched may see its own GPU alone
            raise RecipeError(
                f"cluster.processes_per_node: {count} processes need a GPU each, found {gpus} on "
                f"{socket.gethostname()}"
            )
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
    if place.recipe is None or not place.on_gpus:  # the plan counts what lies beside GPUs
        return Finding("ok", text)
    need = trainer_bytes(place.recipe)
    text = f"{text}, the plan needs {gigabytes(need)}"
    if need > usable:
        return Finding("failed", text, "sbatch --mem, larger nodes, or more of them (eqlen plan RECIPE)")
    return Finding("ok", text)


def shared_memory(place: Place) -> Finding:
    free = shutil.disk_usage("/dev/shm").free
    if free < SHARED_MEMORY:
        return Finding(
            "failed", f"{gigabytes(free)} free in /dev/shm", "docker run --ipc host, or remove old files"
        )
    return Finding("ok", f"{gigabytes(free)} free in /dev/shm")


def disk(place: Place) -> Finding:
    """Write a file to the run folder's disk, wait until it is there, and read it."""
    size = SHORT_SAMPLE if place.short else SAMPLE
    folder = _existing(place.folder)
    block = os.urandom(1 << 20)
    with tempfile.TemporaryFile(dir=folder) as file:

        def write() -> None:
            for _ in range(size >> 20):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())

        def read() -> None:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            file.seek(0)
            while file.read(1 << 20):
                pass

        wrote, fetched = size / seconds(write), size / seconds(read)
    text = f"{folder}: writes {wrote / 1e6:.0f} MB/s, reads {fetched / 1e6:.0f} MB/s"
    if wrote < SLOW_DISK and place.recipe is not None:
        model = model_config(place.recipe)
        text += f": a checkpoint takes {checkpoint_bytes(place.recipe, model) / wrote / 60:.0f} minutes"
    if min(wrote, fetched) < SLOW_DISK:
        return Finding("slow", text, "run_dir=... on a faster file system")
    return Finding("ok", text)


def seconds(work: Callable[[], None]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def space(place: Place) -> Finding:
    """Compare the free space, plus what this run already occupies, with all that the run keeps."""
    folder = _existing(place.folder)
    free = shutil.disk_usage(folder).free
    text = f"{gigabytes(free)} free in {folder}"
    if place.recipe is None:
        return Finding("ok", text)
    recipe, model = place.recipe, model_config(place.recipe)
    need = checkpoint_bytes(recipe, model) * (recipe.checkpoint.keep + 1) + export_bytes(recipe, model)
    has = sum(_size(place.folder / name) for name in ("checkpoints", "export"))
    text += f", checkpoints and export take {gigabytes(need)}" + (
        f" ({gigabytes(has)} are there)" if has else ""
    )
    if free + has < need:
        return Finding("failed", text, "make room, run_dir=... elsewhere, or checkpoint.keep=1")
    return Finding("ok", text)


def hosts(place: Place) -> Finding | None:
    """Let the machines of a SLURM step meet and compare their clocks."""
    count = int(os.environ.get("SLURM_NTASKS", "1"))
    if MEET not in os.environ or count == 1:
        return None
    clocks = meet(os.environ[MEET], count, int(os.environ["SLURM_PROCID"]))
    apart = max(clocks) - min(clocks)
    text = f"{count} hosts meet, their clocks differ by {apart:.2f} s"
    if apart > CLOCKS:
        return Finding(
            "slow", text, "chronyc tracking on the nodes: times in logs and reports will not agree"
        )
    return Finding("ok", text)


def meet(address: str, count: int, number: int) -> list[float]:
    """Return the clocks of ``count`` processes at one moment, in seconds; process 0 is at ``address``."""
    host, _, port = address.rpartition(":")
    try:
        store = TCPStore(host, int(port), is_master=number == 0, timeout=MEETING)
        if store.add("arrived", 1) == count:
            store.set("all", "")
        store.wait(["all"])
        store.set(f"clock {number}", str(time.time()))
        clocks = [float(store.get(f"clock {process}")) for process in range(count)]
        if store.add("read", 1) == count:
            store.set("done", "")
        if number == 0:  # the store lives in this process
            store.wait(["done"])
    except RuntimeError as error:
        raise RuntimeError(
            f"{socket.gethostname()} did not meet {count - 1} others at {address} within "
            f"{MEETING.seconds} s: {str(error).partition(chr(10))[0]}"
        ) from None
    return clocks


def _existing(folder: Path) -> Path:
    """Return ``folder``, or its nearest parent that exists."""
    return next(path for path in (folder.absolute(), *folder.absolute().parents) if path.is_dir())


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


CHECKS = [
    Check("cores", cores),
    Check("memory", host_memory),
    Check("shared memory", shared_memory),
    Check("disk", disk),
    Check("space", space),
    Check("hosts", hosts),
]
