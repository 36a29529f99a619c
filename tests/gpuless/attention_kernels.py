"""Compile the kernels that torch generates for token trees, for a GPU that is not there (``kernels.py``).

Fake CUDA tensors pass through torch.compile as tensors of a GPU do, so torch chooses the block sizes of that
GPU. Two parts of torch need a driver and are replaced: autograd's engine, which asks for CUDA streams, and
the search for fused attention, which computes examples.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any, NoReturn, cast

import torch
import triton
from torch import Tensor
from torch._functorch import config as functorch
from torch._inductor import config as inductor
from torch._inductor.output_code import CompiledFxGraph
from torch._inductor.runtime import triton_heuristics
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import Node, get_gradient_edge
from triton.backends.nvidia.compiler import CUDABackend

from megatron_eqlen.models.tree_attention import flex_tree_attention, tree_block_mask
from megatron_eqlen.models.tree_params import TreeParams
from tests.gpuless.kernels import simulate

LENGTH = 288 * 128
HEADS = {128: (8, 1), 256: (2, 1)}
"""Query and key heads of a rank by head size: Qwen3-30B-A3B at tensor-parallel size 4, Qwen3-Next at 8."""


class Compiled(BaseException):
    """A kernel, or at the end all of them. Torch logs an Exception here with the kernel's source."""


def compile_kernels(capability: int) -> Iterator[tuple[int, str, Any]]:
    """Yield (head size, blocks, kernel) of the forward and backward pass."""
    found: list[tuple[str, Any]] = []
    with FakeTensorMode():
        arguments = {head_dim: _arguments(head_dim) for head_dim in HEADS}
        simulate(capability)  # fake tensors made later would ask for a driver
        _prepare(found)
        for head_dim, (q, k, v, tree) in arguments.items():
            with contextlib.suppress(Compiled):
                flex_tree_attention(q, k, v, tree, head_dim**-0.5)
            yield from ((head_dim, *kernel) for kernel in found)
            found.clear()


def print_memory(capability: int) -> None:
    """Print (head size, kernel, warps, bytes of shared memory) of each kernel, without assembling it."""
    CUDABackend.make_cubin = lambda *_: b""  # pyright: ignore[reportAttributeAccessIssue]
    for head_dim, _, kernel in compile_kernels(capability):
        made = kernel.metadata
        print(head_dim, made.name, made.num_warps, made.shared)


def _arguments(head_dim: int) -> tuple[Tensor, Tensor, Tensor, TreeParams]:
    heads, groups = HEADS[head_dim]
    tree = TreeParams.causal(LENGTH, "cuda")
    tree.block_mask = tree_block_mask(tree.visible_until)
    q, k, v = (
        torch.empty(1, LENGTH, count, head_dim, dtype=torch.bfloat16, device="cuda").transpose(1, 2)
        for count in (heads, groups, groups)
    )
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), tree


def _prepare(found: list[tuple[str, Any]]) -> None:
    """Make torch compile both passes, add their kernels to ``found``, and stop before the first launch."""
    os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"
    functorch.force_non_lazy_backward_lowering = True
    inductor.compile_threads = 1
    inductor.use_joint_graph_passes = inductor.pattern_matcher = False

    def compiled(*args: Any, **kwargs: Any) -> NoReturn:
        raise Compiled(triton.compile(*args, **kwargs))

    def precompile(self: Any, *args: Any, **kwargs: Any) -> None:
        if "_tem_" not in self.fn.__name__:  # the others add up a few numbers per row
            return
        for config in self.configs:
            try:
                self._precompile_config(config)
            except Compiled as kernel:
                blocks = re.findall(r"BLOCK_([MN]\d?) : tl\.constexpr = (\d+)", self.fn.src)
                found.append((", ".join(map(" ".join, blocks)), kernel.args[0]))

    def stop(*args: Any, **kwargs: Any) -> NoReturn:
        raise Compiled

    replaced: Any = triton_heuristics
    replaced.triton = SimpleNamespace(**vars(triton) | {"compile": compiled})
    replaced.triton_helpers.set_driver_to_gpu = lambda: None
    replaced.CachingAutotuner.precompile = precompile
    cast(Any, CompiledFxGraph).__call__ = stop
    cast(Any, torch.autograd)._engine_run_backward = run_backward


def run_backward(
    outputs: Sequence[Tensor],
    gradients: Sequence[Tensor],
    keep_graph: bool,
    create_graph: bool,
    inputs: Sequence[Tensor],
    *args: Any,
    **kwargs: Any,
) -> tuple[Tensor | None, ...]:
    """Return the gradients of ``inputs`` as autograd's engine does, for graphs whose inputs lie before no
    other input."""
    wanted = [get_gradient_edge(tensor) for tensor in inputs]
    arrived: dict[Node, dict[int, Tensor]] = {}

    def arrive(node: Node | None, number: int, gradient: Tensor | None) -> None:
        if node is not None and gradient is not None:
            slots = arrived.setdefault(node, {})
            slots[number] = slots[number] + gradient if number in slots else gradient

    for output, gradient in zip(outputs, gradients, strict=True):
        edge = get_gradient_edge(output)
        arrive(edge.node, edge.output_nr, gradient)
    done = {edge.node for edge in wanted}
    while waiting := arrived.keys() - done:
        node: Any = max(waiting, key=lambda node: node._sequence_nr())
        done.add(node)
        slots = arrived[node]
        given = [
            slots.get(number, torch.zeros(each.shape, dtype=each.dtype, device=each.device))
            for number, each in enumerate(node._input_metadata)
        ]
        made = getattr(node, "apply", node)(*given)
        made = made if isinstance(made, tuple) else (made,)
        for (above, number), gradient in zip(node.next_functions, made, strict=False):
            arrive(above, number, gradient)
    return tuple(arrived.get(edge.node, {}).get(edge.output_nr) for edge in wanted)
