"""PyTorch's profiles of a step on every rank, in the run's folder ``profile/``:

step-00000003-rank-0.json.gz    a trace in Chrome's format (perfetto.dev, chrome://tracing), which names
                                stages and kinds of layers; so do NVTX ranges on a GPU
out-of-memory-rank-0.pickle     contents of a GPU's memory when it ran out (pytorch.org/memory_viz)
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.ssm.gated_delta_net import GatedDeltaNet
from megatron.core.transformer.attention import Attention
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from megatron_eqlen.files import replaced, step_name
from megatron_eqlen.recipe import ProfileRecipe

KINDS: dict[type[nn.Module], str] = {
    Attention: "attention",
    GatedDeltaNet: "delta net",
    MoELayer: "experts",
    MLP: "mlp",
}
"""Names of a layer's two halves."""
EVENTS = 100_000
"""Newest allocations and releases in a memory snapshot, with their stacks: some KB each."""


class Profiler:
    """Profiler of this rank; ``folder`` is the run's ``profile/``."""

    def __init__(self, folder: Path, recipe: ProfileRecipe) -> None:
        self._folder, self._recipe = folder, recipe
        self._profile: profile | None = None
        self._named = contextlib.ExitStack()

    def begin(self, step: int, chunks: Sequence[nn.Module]) -> None:
        """Begin a trace if step ``step`` (from 1) is one of the recipe's; the layers of ``chunks`` are named
        in it."""
        if step not in self._recipe.steps or self._profile is not None:
            return
        gpu = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
        self._profile = profile(activities=[ProfilerActivity.CPU, *gpu], profile_memory=self._recipe.memory)
        self._named.enter_context(named_layers(chunks))
        self._profile.start()

    def end(self, step: int) -> None:
        """End the trace and write it, if this was one of the recipe's steps."""
        if self._profile is None or step not in self._recipe.steps:
            return
        self._profile.stop()
        self._named.close()
        self._folder.mkdir(parents=True, exist_ok=True)
        name = f"{step_name(step)}-rank-{dist.get_rank()}.json.gz"
        with replaced(self._folder / name) as partial:
            compressed = partial.with_name(f"{partial.name}.gz")  # torch reads the suffix
            try:
                self._profile.export_chrome_trace(str(compressed))
                compressed.rename(partial)
            finally:
                compressed.unlink(missing_ok=True)
        self._profile = None


@contextlib.contextmanager
def marked(name: str) -> Iterator[None]:
    """Give the code in the block this name in traces."""
    with record_function(name):
        if not torch.cuda.is_available():
            yield
            return
        with torch.cuda.nvtx.range(name):
            yield


@contextlib.contextmanager
def named_layers(chunks: Sequence[nn.Module]) -> Iterator[None]:
    """Mark the forward pass of each layer's halves by its kind in the block, also when recomputed."""
    layers = [
        module for chunk in chunks for module in chunk.modules() if isinstance(module, TransformerLayer)
    ]
    running: list[contextlib.AbstractContextManager[None]] = []
    with contextlib.ExitStack() as hooks:
        for half in (half for layer in layers for half in (layer.self_attention, layer.mlp)):
            assert isinstance(half, nn.Module)
            name = next(f"layer {kind}" for cls, kind in KINDS.items() if isinstance(half, cls))

            def enter(*_: Any, name: str = name) -> None:
                running.append(marked(name))
                running[-1].__enter__()

            def leave(*_: Any) -> None:
                running.pop().__exit__(None, None, None)

            hooks.callback(half.register_forward_pre_hook(enter).remove)
            hooks.callback(half.register_forward_hook(leave, always_call=True).remove)
        yield


@contextlib.contextmanager
def snapshot_when_out_of_memory(folder: Path) -> Iterator[None]:
    """Write a memory snapshot to ``folder`` if the GPU runs out of memory in the block. No effect without a
    GPU."""
    torch.cuda.memory._record_memory_history(stacks="python", max_entries=EVENTS)
    try:
        yield
    except torch.OutOfMemoryError:
        folder.mkdir(parents=True, exist_ok=True)
        with replaced(folder / f"out-of-memory-rank-{dist.get_rank()}.pickle") as partial:
            torch.cuda.memory._dump_snapshot(str(partial))
        raise
    finally:
        torch.cuda.memory._record_memory_history(None)
