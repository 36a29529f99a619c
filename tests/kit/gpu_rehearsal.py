"""Construct the trainer and the engine of recipes as a GPU constructs them, without one and without memory.

    python -m tests.kit.gpu_rehearsal RECIPE ...    # prints a line of JSON for each

torch says that it has eight H100s, so Megatron-Core is imported with its code for CUDA as it is; tensors are
on torch's meta device, process groups are torch's fake ones of the recipe's size, and this is in turn their
first and their last rank. Where Transformer Engine is not installed, its classes are the stand-ins of
``transformer_engine_names.py``. Nothing is computed.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

META = torch.device("meta")
STAY = ("cpu", "cuda", "pin_memory")
"""Methods that copy a tensor to another device."""


class _Anything:
    """A stream or an event."""

    def __init__(self, *_: Any, **__: Any) -> None: ...
    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


def be_a_gpu() -> None:
    """From here on torch has GPUs in this process. Call before Megatron-Core is imported."""
    size = {"multi_processor_count": 132, "total_memory": 80 << 30}
    properties = SimpleNamespace(major=9, minor=0, name="H100", **size)
    answers: dict[str, Any] = {
        "is_available": True, "is_initialized": True, "device_count": 8, "current_device": META,
        "get_device_capability": (9, 0), "get_device_name": "NVIDIA H100 80GB HBM3",
        "get_device_properties": properties, "mem_get_info": (80 << 30, 80 << 30), "memory_allocated": 0,
        "is_current_stream_capturing": False, "get_rng_state": torch.get_rng_state(),
        "current_stream": _Anything(), "default_stream": _Anything(), "stream": contextlib.nullcontext(),
        "synchronize": None, "empty_cache": None, "set_device": None, "set_rng_state": None,
        "manual_seed": None, "_lazy_call": None,
    }  # fmt: skip
    for name, answer in answers.items():
        setattr(torch.cuda, name, lambda *_, answer=answer, **__: answer)
    torch.cuda.Stream = torch.cuda.Event = _Anything
    torch.Tensor.is_cuda = property(lambda self: True)
    new_group = dist.new_group

    def fake_group(*ranks: Any, **options: Any) -> Any:
        return new_group(*ranks, **options | {"backend": "fake", "pg_options": None})

    def own_objects(objects: list[Any], own: Any, *_: Any, **__: Any) -> None:
        objects[:] = [own] * len(objects)

    dist.new_group = dist.distributed_c10d.new_group = fake_group
    dist.all_gather_object = own_objects


class _OnMeta(TorchFunctionMode):
    """All devices are meta."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if getattr(func, "__name__", "") in STAY:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1:
            return func(*args).replace("torch.meta.", "torch.cuda.")
        kwargs.pop("pin_memory", None)
        if kwargs.get("device") is not None:
            kwargs["device"] = META
        return func(*args, **kwargs)


@contextlib.contextmanager
def world(recipe: Any, rank: int) -> Iterator[None]:
    """Be one of the recipe's ranks in the block."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from megatron_eqlen.models import groups

    ranks, here = recipe.world_size, recipe.cluster.processes_per_node
    os.environ.update(WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(here), RANK=str(rank), LOCAL_RANK="0")
    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    groups.start(recipe.parallel, 1)
    try:
        yield
    finally:
        groups.parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def trainer(recipe: Any, rank: int) -> dict[str, Any]:
    """Build the model, DDP and the optimizer of a rank; return their sizes."""
    from megatron_eqlen.job import Job
    from megatron_eqlen.models.build import build_model
    from megatron_eqlen.models.lora import add_adapters
    from megatron_eqlen.training.optimizer import build_optimizer, wrap

    dtype, adapts = getattr(torch, recipe.model.dtype), recipe.lora.rank > 0
    job = Job(recipe)
    with world(recipe, rank), META, _OnMeta():
        chunks = build_model(job.model, recipe.parallel, dtype, separate_norms=adapts, **job.megatron[0])
        if adapts:
            add_adapters(chunks, recipe.lora, 1)
        wrapped = wrap(chunks, recipe.optimizer.grad_dtype, job.megatron[1])
        optimizer, _ = build_optimizer(wrapped, recipe)
        buffers = [b for c in wrapped for b in (*c.buffers, *c.expert_parallel_buffers)]
        parameters = [p for c in chunks for p in c.parameters()]
        assert all(p.is_meta for p in parameters)
        return {
            "parameters": sum(p.numel() for p in parameters),
            "trained": sum(p.numel() for p in parameters if p.requires_grad),
            "gradients": sum(b.grad_data.numel() for b in buffers),
            "optimizers": sorted({type(part.optimizer).__name__ for part in optimizer.chained_optimizers}),
        }


def engine(recipe: Any) -> dict[str, Any]:
    """Build vLLM's engine arguments; return those that are numbers or texts."""
    from vllm.engine.arg_utils import EngineArgs

    from megatron_eqlen.engines import lifecycle, vllm_args
    from megatron_eqlen.job import KNOWN_MODELS

    with tempfile.TemporaryDirectory() as folder:
        shipped = KNOWN_MODELS / f"{Path(recipe.model.path).name.lower()}.json"
        (Path(folder) / "config.json").write_text(shipped.read_text())
        vllm_args.STOCK = True
        vllm_args.current_platform = SimpleNamespace(is_cpu=lambda: False)
        args = vllm_args.engine_args(folder, recipe.rollout, recipe.model.dtype, recipe.longest_path)
        EngineArgs(**dict.fromkeys(lifecycle.SLEEPING, True) | args)
    return {name: value for name, value in args.items() if isinstance(value, int | float | str)}


def scaled_rope_on_the_host() -> None:
    """Let the angles of a scaled rope be computed as on GPUs: on the host."""
    from megatron_eqlen.models import build, config

    compute = config.scaled_rope

    def computed(model: Any) -> Any:
        with torch._C.DisableTorchFunction(), torch.device("cpu"):
            return compute(model)

    build.scaled_rope = config.scaled_rope = computed


def main(paths: list[str]) -> None:
    be_a_gpu()
    importlib.import_module("megatron_eqlen.models")  # before Megatron-Core
    from megatron_eqlen.megatron_cpu import packages
    from megatron_eqlen.recipe.load import load
    from tests.kit.transformer_engine_names import stand_in

    if not packages.look(packages.TRANSFORMER_ENGINE).installed:
        stand_in()

    scaled_rope_on_the_host()
    built: dict[str, Any] = {}
    for path in paths:
        recipe = load(Path(path))
        same = str([recipe.model, recipe.parallel, recipe.optimizer, recipe.lora, recipe.world_size])
        if same not in built:
            built[same] = [trainer(recipe, rank) for rank in sorted({0, recipe.world_size - 1})]
        print(json.dumps({"recipe": path, "ranks": built[same], "engine": engine(recipe)}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
