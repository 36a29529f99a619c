"""GPUs: driver, memory, kernels and interconnect."""

from __future__ import annotations

import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from importlib import metadata
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.cuda import nccl

from megatron_eqlen.check.finding import Check, Finding, Place, gigabytes
from megatron_eqlen.plan.memory import memory
from megatron_eqlen.plan.model import model_config

HOPPER = 9
"""Major compute capability of H100 and H200."""
WRONG_ON_HOPPER = (3, 4), (3, 7, 1)
"""First Triton whose gradients of Gated DeltaNet are wrong on Hopper, and the first mended one."""
TOLERANCE = 2e-2
"""Largest difference of two attentions in bfloat16, of numbers around 1."""


def gpus(place: Place) -> Finding:
    """Report driver, number and names of the GPUs; each one multiplies two matrices."""
    if not torch.cuda.is_available():
        return Finding("missing", f"no CUDA device{_why()}", "" if not place.on_gpus else _todo())
    count = torch.cuda.device_count()
    if place.on_gpus and place.processes > count:
        asked = f"{place.processes} processes a node (cluster.processes_per_node)"
        return Finding("failed", f"{count} GPUs for {asked}", "ask SLURM for as many: --gpus-per-node")
    for device in range(count):
        if (found := multiplied(torch.device("cuda", device))) != 64.0:
            return Finding(
                "failed", f"GPU {device} computes {found} for 64", "leave the node out; nvidia-smi -q"
            )
    names = {torch.cuda.get_device_properties(device).name for device in range(count)}
    return Finding("ok", f"{count} x {', '.join(sorted(names))}, driver {_driver() or 'unknown'}")


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
    recipe = place.recipe.model_copy(update={"cluster": cluster})
    need = memory(recipe, model_config(recipe))
    text = f"{text}, the plan needs {gigabytes(need.peak)}"
    if problems := need.problems():
        return Finding("failed", f"{text}: {'; '.join(problems)}", "eqlen plan RECIPE shows what takes it")
    if free < need.peak:
        return Finding("failed", text, "nvidia-smi shows which processes have the rest")
    return Finding("ok", text)


def collectives(place: Place) -> Finding:
    """Run an all-reduce: with NCCL between all GPUs of this machine, or without GPUs with gloo between two
    threads."""
    if not torch.cuda.is_available():
        sums, by, todo = reduced_by_gloo(), "gloo", ""
    else:
        sums = reduced_by_nccl()
        by = f"NCCL {'.'.join(map(str, nccl.version()))} between {len(sums)} GPUs"
        todo = "NCCL_DEBUG=INFO shows the links"
    if {*sums} != {len(sums)}:
        return Finding("failed", f"{by}: a sum of {len(sums)} ones is {sums}", todo)
    return Finding("ok", by)


def reduced_by_nccl() -> list[float]:
    """Return the sum of a 1 from each GPU of this machine, as each GPU received it."""
    ones = [torch.ones(1 << 20, device=f"cuda:{number}") for number in range(torch.cuda.device_count())]
    nccl.all_reduce(ones)
    return [float(tensor.max()) for tensor in ones]


def reduced_by_gloo() -> list[float]:
    """Return the sum of a 1 from each of two threads, as each thread received it."""
    store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage] (documented, not in __all__)
    numbers = [torch.ones(4) for _ in range(2)]

    def rank(number: int) -> float:
        group: Any = dist.ProcessGroupGloo(store, number, 2, timedelta(seconds=20))
        group.allreduce([numbers[number]]).wait()
        return float(numbers[number].max())

    with ThreadPoolExecutor(2) as threads:
        return [*threads.map(rank, range(2))]


def flex_attention(place: Place) -> Finding | None:
    """Compare compiled FlexAttention, forward and backward, with plain attention. Token trees on GPUs run on
    it."""
    if not torch.cuda.is_available():
        return None
    from torch.nn.attention import flex_attention as flex

    q, k, v = (torch.randn(1, 2, 256, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    mask = flex.create_block_mask(_causal, None, None, 256, 256, device="cuda")
    compiled = torch.compile(flex.flex_attention)

    def tree(q: Tensor) -> Tensor:
        out = compiled(q, k, v, block_mask=mask)
        assert isinstance(out, Tensor)
        return out

    def plain(q: Tensor) -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    found, expected = _with_gradient(tree, q), _with_gradient(plain, q)
    off = max(float((tensor - other).abs().max()) for tensor, other in zip(found, expected, strict=True))
    if off > TOLERANCE:
        return Finding("failed", f"differs from plain attention by {off:.3g}", "tools/setup gpu")
    return Finding("ok", "compiles, forward and backward")


def delta_net_gradients(place: Place) -> Finding | None:
    """Refuse a Triton whose compiler makes wrong gradients of Gated DeltaNet on Hopper (fla issues 826 and
    983)."""
    if place.recipe is None or model_config(place.recipe).delta_net is None or not torch.cuda.is_available():
        return None
    version = metadata.version("triton")
    found = tuple(map(int, re.findall(r"\d+", version)[:3]))
    if (
        torch.cuda.get_device_capability()[0] != HOPPER
        or not WRONG_ON_HOPPER[0] <= found < WRONG_ON_HOPPER[1]
    ):
        return Finding("ok", f"Triton {version}")
    return Finding("failed", f"Triton {version} on Hopper, expected 3.7.1 or newer", "tools/setup gpu")


def _causal(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return key <= query


def _with_gradient(attend, q: Tensor) -> tuple[Tensor, Tensor]:
    leaf = q.detach().clone().requires_grad_()
    out = attend(leaf)
    out.sum().backward()
    assert leaf.grad is not None
    return out.detach(), leaf.grad


def _why() -> str:
    if torch.version.cuda is None:
        return f" (torch {torch.__version__} was built for CPUs)"
    return f" (torch for CUDA {torch.version.cuda}, driver {_driver() or 'not found'})"


def _todo() -> str:
    if torch.version.cuda is None:
        return "tools/setup gpu; for a run on CPUs cluster.device=cpu"
    return "a driver of 580 or newer, and a job that asks for GPUs (--gpus-per-node); else cluster.device=cpu"


def _driver() -> str:
    """Return NVIDIA's driver version; empty without NVIDIA's tools."""
    if (program := shutil.which("nvidia-smi")) is None:
        return ""
    command = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    said = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    return said.stdout.partition("\n")[0].strip() if said.returncode == 0 else ""


def _gpus_needed(place: Place) -> bool:
    return place.on_gpus


CHECKS = [
    Check("gpus", gpus, needed=_gpus_needed),
    Check("gpu memory", gpu_memory),
    Check("collectives", collectives),
    Check("flex attention", flex_attention, in_short=False),
    Check("delta net gradients", delta_net_gradients),
]
