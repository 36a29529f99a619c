"""Converters learn about a model on the meta device: nothing is allocated anywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.kit.distributed import run_ranks
from tests.kit.tiny_models import FAMILIES, tiny_config


class Allocated(TorchDispatchMode):
    """Remembers every tensor with memory that is made or moved."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        out = func(*args, **kwargs or {})
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor) and not leaf.is_meta:
                self.found.append(f"{func}: {tuple(leaf.shape)} on {leaf.device}")
        return out


def allocations(folder: Path) -> list[str]:
    """Return allocations made to work out a checkpoint's layout, on a machine that pretends to have a GPU."""
    from megatron_eqlen.hf.config import read_config
    from megatron_eqlen.megatron_cpu import cuda_namespace
    from megatron_eqlen.models.groups import start
    from megatron_eqlen.models.megatron_checkpoint import checkpoint_layout
    from megatron_eqlen.recipe import ParallelRecipe

    def on_a_gpu(*_: object) -> None:
        raise AssertionError("a module was moved to the GPU")

    start(ParallelRecipe(), seed=1)
    model = read_config(folder)
    with pytest.MonkeyPatch.context() as patch, Allocated() as allocated:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(cuda_namespace, "current_device", lambda: torch.device("cuda", 0))
        patch.setattr(torch.nn.Module, "cuda", on_a_gpu)
        patch.setattr(torch.Tensor, "cuda", on_a_gpu)
        layout = checkpoint_layout(model)
    assert layout.pieces
    return allocated.found


@pytest.mark.parametrize("family", FAMILIES)
def test_a_checkpoints_layout_takes_no_memory_on_any_device(tmp_path, family):
    tiny_config(family).save_pretrained(tmp_path)
    assert run_ranks(1, allocations, tmp_path)[0] == []


def used_on_the_gpu(folder: Path) -> int:
    from megatron_eqlen.hf.config import read_config
    from megatron_eqlen.models.groups import start
    from megatron_eqlen.models.megatron_checkpoint import checkpoint_layout
    from megatron_eqlen.recipe import ParallelRecipe

    start(ParallelRecipe(), seed=1)
    checkpoint_layout(read_config(folder))
    return torch.cuda.max_memory_allocated()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("family", FAMILIES)
def test_a_gpu_stays_empty(tmp_path, family):
    tiny_config(family).save_pretrained(tmp_path)
    assert run_ranks(1, used_on_the_gpu, tmp_path) == [0]


def visible_gpus() -> tuple[str | None, bool]:
    import os

    from megatron_eqlen.cli import convert as convert_command

    assert convert_command
    return os.environ.get("CUDA_VISIBLE_DEVICES"), torch.cuda.is_available()


def test_the_commands_see_no_gpu():
    """Otherwise a CUDA context would take memory of a GPU that trains."""
    assert run_ranks(1, visible_gpus) == [("", False)]
