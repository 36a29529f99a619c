"""Compile kernels for a GPU that is not there, and print what each one takes of it.

    tools/gpuless kernels       # A100, H100 and B200
    tools/gpuless kernels 90    # compute capability 9.0: H100

FlexAttention's kernels for token trees, as torch generates them (``attention_kernels.py``), and fla's kernels
of Gated DeltaNet for a rank's heads of Qwen3-Next at tensor-parallel size 8. Of the configurations between
which fla's tuning chooses, the first and the last that it keeps are compiled.
"""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import autotuner, driver, jit

SHARED = {80: 166912, 90: 232448, 100: 232448}
"""Bytes of shared memory that a block may have (CUDA C++ programming guide, technical specifications)."""
NAMES = {80: "NVIDIA A100-SXM4-80GB", 90: "NVIDIA H100 80GB HBM3", 100: "NVIDIA B200"}
KEY_HEADS, VALUE_HEADS, HEAD_DIM, LENGTH, CHUNK = 2, 4, 128, 256, 64


class Kernel(NamedTuple):
    name: str
    registers: int
    stack: int
    """Bytes of a thread's stack in local memory: spilled registers."""
    shared: int
    """Bytes of shared memory."""
    warps: int
    stages: int

    def line(self) -> str:
        launch = f"{self.warps}, {self.stages}"
        return f"`{self.name}` | {launch} | {self.registers} | {self.stack} | {self.shared}"


class Driver:
    """A driver of Triton's that knows the GPU's limits and launches nothing."""

    def __init__(self, capability: int) -> None:
        self.capability = capability
        self.utils = SimpleNamespace(get_device_properties=self._properties)

    def _properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": SHARED[self.capability], "multiprocessor_count": 108, "warpSize": 32}

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def simulate(capability: int) -> None:
    """Make torch and Triton see one GPU, on which nothing can be launched. No two functions are the same
    object: torch keeps rules by function."""
    driver.set_active(Driver(capability))  # pyright: ignore[reportArgumentType]
    major, minor = divmod(capability, 10)
    properties = SimpleNamespace(
        name=NAMES[capability],
        major=major,
        minor=minor,
        multi_processor_count=108,
        max_threads_per_multi_processor=2048,
        max_threads_per_block=1024,
        regs_per_multiprocessor=65536,
        shared_memory_per_block_optin=SHARED[capability],
        shared_memory_per_multiprocessor=SHARED[capability] + 1024,
        total_memory=80 << 30,
        warp_size=32,
        L2_cache_size=40 << 20,
        gcnArchName="",
    )
    cuda: Any = torch.cuda
    cuda.is_available = lambda: True
    cuda.device_count = lambda: 1
    cuda.current_device = lambda: 0
    cuda.get_device_capability = lambda *_: (major, minor)
    cuda.get_device_name = lambda *_: properties.name
    cuda.get_device_properties = lambda *_: properties
    cuda._get_device_properties = lambda *_: properties
    cuda.get_rng_state = lambda *_: torch.zeros(16, dtype=torch.uint8)
    cuda.set_rng_state = lambda *_: None
    cuda._lazy_init = lambda: None
    cuda._exchange_device = lambda device: 0
    cuda._maybe_exchange_device = lambda device: 0


def usage(cubin: bytes, kernel: str) -> tuple[int, int]:
    """Return registers and bytes of stack of a thread, as NVIDIA's cuobjdump has them."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        said = subprocess.run(
            [tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        )
    found = re.search(rf"Function {kernel}:\s*REG:(\d+) STACK:(\d+)", said.stdout)
    assert found, said.stdout
    return int(found[1]), int(found[2])


def collect() -> list[Kernel]:
    """Make kernels compile and not run; return the list that they are added to."""
    found: list[Kernel] = []
    compiled = jit.JITFunction.run

    def mocked(value: Any) -> Any:
        return jit.MockTensor(value.dtype, value.shape) if isinstance(value, torch.Tensor) else value

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        given = {name: mocked(value) for name, value in kwargs.items()}
        kernel = compiled(self, *map(mocked, args), grid=grid, warmup=True, **given)
        found.append(measured(kernel))

    def first_and_last(self: Any, *args: Any, **kwargs: Any) -> None:
        self.nargs = dict(zip(self.arg_names, args, strict=False))
        kept = self.prune_configs(kwargs)
        for config in (kept[0], kept[-1])[: len(kept)]:
            self.fn.run(*args, **kwargs, **config.all_kwargs())

    jit.JITFunction.run = compile_only  # pyright: ignore[reportAttributeAccessIssue]
    autotuner.Autotuner.run = first_and_last
    from fla.ops.utils import cache  # pyright: ignore[reportMissingImports]

    for own in vars(cache).values():
        if inspect.isclass(own) and issubclass(own, autotuner.Autotuner) and "run" in vars(own):
            own.run = first_and_last
    return found


def passes() -> Iterator[str]:
    """Call the forward and backward pass and the convolution, on two sequences in a row."""
    from fla.modules.causal_conv1d import causal_conv1d  # pyright: ignore[reportMissingImports]
    from fla.ops.gated_delta_rule import chunk  # pyright: ignore[reportMissingImports]

    def made(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype)

    keys, values = (1, LENGTH, KEY_HEADS, HEAD_DIM), (1, LENGTH, VALUE_HEADS, HEAD_DIM)
    state = made(2, VALUE_HEADS, HEAD_DIM, HEAD_DIM, dtype=torch.float32)
    decay, beta = made(*values[:3], dtype=torch.float32), made(*values[:3])
    inputs = (made(*keys), made(*keys), made(*values), decay, beta)
    common = {
        "scale": HEAD_DIM**-0.5,
        "cu_seqlens": torch.tensor([0, 100, LENGTH]),
        "chunk_indices": torch.tensor([(0, 0), (0, 1), (1, 0), (1, 1), (1, 2)]),
        "chunk_size": CHUNK,
        "initial_state": state,
    }
    chunk.chunk_gated_delta_rule_fwd(*inputs, output_final_state=True, **common)
    yield "forward"
    triangle = made(*values[:3], CHUNK)
    chunk.chunk_gated_delta_rule_bwd(*inputs, A=triangle, do=made(*values), dht=state, **common)
    yield "backward"
    channels = 2 * KEY_HEADS * HEAD_DIM + VALUE_HEADS * HEAD_DIM
    x, weight = made(1, LENGTH, channels).requires_grad_(), made(channels, 4).requires_grad_()
    causal_conv1d(x, weight)[0].sum().backward()
    yield "convolution"


def measured(kernel: Any) -> Kernel:
    made = kernel.metadata
    return Kernel(
        made.name, *usage(kernel.asm["cubin"], made.name), made.shared, made.num_warps, made.num_stages
    )


def attention_table(capability: int) -> None:
    from tests.gpuless import attention_kernels

    print("| head size | blocks of queries and keys | kernel | warps, stages | registers | stack | shared |")
    print("|---|---|---|---|---|---|---|")
    for head_dim, blocks, compiled in attention_kernels.compile_kernels(capability):
        print(f"| {head_dim} | {blocks} | {measured(compiled).line()} |", flush=True)


def delta_net_table(capability: int) -> None:
    os.environ["FLA_TILELANG"] = "0"
    simulate(capability)
    found, shown = collect(), 0
    print("| pass | kernel | warps, stages | registers | stack | shared |\n|---|---|---|---|---|---|")
    for name in passes():
        for kernel in dict.fromkeys(found[shown:]):
            print(f"| {name} | {kernel.line()} |", flush=True)
        shown = len(found)


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[2:]:
        capability, table = int(sys.argv[1]), sys.argv[2]
        {"attention": attention_table, "delta_net": delta_net_table}[table](capability)
    for capability in map(int, [] if sys.argv[2:] else sys.argv[1:] or SHARED):
        print(f"sm_{capability}: {SHARED[capability]} bytes of shared memory a block", flush=True)
        for table in ("attention", "delta_net"):  # each replaces parts of torch and Triton
            command = [sys.executable, "-m", "tests.gpuless.kernels", str(capability), table]
            subprocess.run(command, check=True)
