"""GPUs: number, memory and interconnect."""

from __future__ import annotations

import torch
from torch.cuda import nccl

from megatron_eqlen.check.finding import Check, Finding, Place, gigabytes
from megatron_eqlen.job import Job
from megatron_eqlen.plan.memory import memory


def gpus(place: Place) -> Finding:
    """Report number and names of the GPUs; each one multiplies two matrices."""
    if not torch.cuda.is_available():
        todo = "nvidia-smi, a job that asks for GPUs, tools/setup gpu; else cluster.device=cpu"
        built = f"torch {torch.__version__} is for CUDA {torch.version.cuda or '(none)'}"
        return Finding("missing", f"no CUDA device; {built}", todo if place.on_gpus else "")
    count = torch.cuda.device_count()
    if place.on_gpus and place.processes > count:
        asked = f"{place.processes} processes a node (cluster.processes_per_node)"
        return Finding("failed", f"{count} GPUs for {asked}", "ask SLURM for as many: --gpus-per-node")
    for device in range(count):
        if (product := multiplied(torch.device("cuda", device))) != 64.0:
            return Finding(
                "failed", f"GPU {device} computes {product} for 64", "leave the node out; nvidia-smi -q"
            )
    names = {torch.cuda.get_device_properties(device).name for device in range(count)}
    return Finding("ok", f"{count} x {', '.join(sorted(names))}")


def multiplied(device: torch.device) -> float:
    """Return 64 on a device that computes correctly."""
    ones = torch.ones(64, 64, device=device)
    return float((ones @ ones).max())


def gpu_memory(place: Place) -> Finding | None:
    """Check that the plan fits these GPUs, and that no other process holds much of their memory."""
    if not torch.cuda.is_available():
        return None
    sizes = [torch.cuda.mem_get_info(device) for device in range(torch.cuda.device_count())]
    free, total = min(size for size, _ in sizes), min(size for _, size in sizes)
    text = f"{gigabytes(free)} free of {gigabytes(total)}"
    if place.recipe is None or not place.on_gpus:
        return Finding("ok", text)
    cluster = place.recipe.cluster.model_copy(update={"gpu_memory_gib": total / 2**30})
    need = memory(Job(place.recipe.model_copy(update={"cluster": cluster})))
    text = f"{text}, the plan needs {gigabytes(need.peak)}"
    if problems := need.problems():
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


CHECKS = [
    Check("gpus", gpus, needed=lambda place: place.on_gpus),
    Check("gpu memory", gpu_memory),
    Check("collectives", collectives),
]
