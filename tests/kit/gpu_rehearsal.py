"""Construct the trainer and the engine of recipes as a GPU constructs them, without one and without memory.

    python -m tests.kit.gpu_rehearsal RECIPE ...    # prints a line of JSON for each

torch says that it has eight H100s, so Megatron-Core is imported with its code for CUDA as it is; tensors are
on torch's meta device, process groups are torch's fake ones of the recipe's size, and this is in turn a rank
of each pipeline stage. Where Transformer Engine is not installed, its classes are the stand-ins of
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
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

META = torch.device("meta")
STAY = {torch.Tensor.cpu, torch.Tensor.cuda, torch.Tensor.pin_memory}
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
        if func in STAY:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1:
            return func(*args).replace("torch.meta.", "torch.cuda.")
        kwargs = {name: value for name, value in (kwargs or {}).items() if name != "pin_memory"}
        if kwargs.get("device") is not None or func in _device_constructors():
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


def trainer(job: Any, rank: int) -> dict[str, Any]:
    """Build the model, DDP, the optimizer and the teacher of a rank; return their sizes."""
    from megatron_eqlen.models.build import build_model
    from megatron_eqlen.models.lora import add_adapters
    from megatron_eqlen.training.optimizer import build_optimizer, wrap

    recipe = job.recipe
    dtype, adapts = getattr(torch, recipe.model.dtype), recipe.lora.rank > 0
    with world(recipe, rank), _OnMeta():
        chunks = build_model(job.model, recipe.parallel, dtype, separate_norms=adapts, **job.megatron.model)
        if adapts:
            add_adapters(chunks, recipe.lora, 1)
        wrapped = wrap(chunks, recipe.optimizer.grad_dtype, job.megatron.ddp)
        optimizer, _ = build_optimizer(wrapped, recipe, job.megatron.optimizer)
        taught = build_model(job.teacher.model, job.teacher.recipe.parallel, dtype) if job.teacher else []
        buffers = [b for c in wrapped for b in (*c.buffers, *c.expert_parallel_buffers)]
        parameters, teacher = ([p for c in model for p in c.parameters()] for model in (chunks, taught))
        assert all(p.is_meta for p in [*parameters, *teacher])
        return {
            "parameters": sum(p.numel() for p in parameters),
            "trained": sum(p.numel() for p in parameters if p.requires_grad),
            "gradients": sum(b.grad_data.numel() for b in buffers),
            "teacher": sum(p.numel() for p in teacher),
            "optimizers": sorted({type(part.optimizer).__name__ for part in optimizer.chained_optimizers}),
        }


def ranks(recipe: Any) -> list[int]:
    """Return the first rank of each pipeline stage, but the last stage's last; ranks are neighbours."""
    each = recipe.world_size // recipe.parallel.pipeline
    return [*range(0, recipe.world_size - each, each), recipe.world_size - 1]


def look_at_models() -> None:
    """Let vLLM import the modules of all models that the recipes name: for CPUs, because its wheel lacks the
    libraries of CUDA's kernels. It remembers what it has looked at."""
    from vllm.model_executor.models import registry

    from megatron_eqlen.job import KNOWN_MODELS

    if find_spec("torchvision") is None:  # set-ups for GPUs have it; nothing of it is called
        for name in ("torchvision", "torchvision.transforms", "torchvision.transforms.v2"):
            sys.modules[name] = MagicMock(__spec__=None)
    registry._run_in_subprocess = lambda look: look()
    configs = [json.loads(path.read_text()) for path in KNOWN_MODELS.glob("*.json")]
    for architecture in {name for config in configs for name in config["architectures"]}:
        assert registry.ModelRegistry._try_inspect_model_cls(architecture) is not None, architecture


def be_vllm_for_gpus() -> None:
    """From here on vLLM's platform is CUDA's in this process, with all its kernels."""
    from vllm import _custom_ops
    from vllm.config import vllm

    from megatron_eqlen.engines import lifecycle, vllm_args

    sys.modules["vllm._C_stable_libtorch"] = ModuleType("kernels")
    for name in ("cutlass_scaled_mm_supports_fp8", "cutlass_scaled_mm_supports_block_fp8"):
        assert hasattr(_custom_ops, name)
        setattr(_custom_ops, name, lambda capability: True)
    from vllm.platforms.cuda import NonNvmlCudaPlatform

    class Platform(NonNvmlCudaPlatform):
        def is_cumem_allocator_available(self) -> bool:
            return True

        @classmethod
        def device_count(cls) -> int:
            return 8

    assert lifecycle.current_platform is vllm_args.current_platform
    vllm_args.current_platform.__class__ = Platform
    vllm_args.VLLM_SAMPLES = vllm.HAS_TRITON = True


def shipped(recipe: Any) -> Path:
    """Return the configuration of a recipe's model that comes with the package."""
    from megatron_eqlen.job import KNOWN_MODELS

    return KNOWN_MODELS / f"{Path(recipe.model.path).name.lower()}.json"


def served(recipe: Any, folder: str) -> Any:
    """Build the configuration of a server of the model in ``folder``."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from megatron_eqlen.engines.server.__main__ import server_command

    changes = {"model": recipe.model.model_copy(update={"path": folder})}
    (_, _, _, *flags), environ = server_command(recipe.model_copy(update=changes), 8000)
    os.environ |= environ
    args = make_arg_parser(FlexibleArgumentParser()).parse_args(flags)
    return AsyncEngineArgs.from_cli_args(args).create_engine_config()


def engine(job: Any) -> dict[str, Any]:
    """Build vLLM's configuration, a server's from its flags; return what decides an engine's code."""
    from megatron_eqlen.engines import lifecycle

    recipe = job.recipe
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(shipped(recipe).read_text())
        if recipe.rollout.engine == "server":
            made = served(recipe, folder)
        else:
            made = lifecycle.configuration(
                folder, recipe.rollout, recipe.model.dtype, recipe.longest_context, 0
            )
    return {
        "tensor_parallel_size": made.parallel_config.tensor_parallel_size,
        "quantization": made.model_config.quantization,
        "enforce_eager": made.model_config.enforce_eager,
        "device": str(made.device_config.device),
        "sleeps": made.model_config.enable_sleep_mode,
    }


def scaled_rope_on_the_host() -> None:
    """Let the angles of a scaled rope be computed as on GPUs: on the host."""
    from megatron_eqlen.models import build, config

    compute = config.scaled_rope

    def computed(model: Any) -> Any:
        with torch._C.DisableTorchFunction(), torch.device("cpu"):
            return compute(model)

    build.scaled_rope = config.scaled_rope = computed


def main(paths: list[str]) -> None:
    look_at_models()
    be_a_gpu()
    importlib.import_module("megatron_eqlen.models")  # before Megatron-Core
    from megatron_eqlen.job import Job
    from megatron_eqlen.megatron_cpu import packages
    from megatron_eqlen.recipe.load import load
    from tests.kit.transformer_engine_names import stand_in

    if not packages.look(packages.TRANSFORMER_ENGINE).installed:
        stand_in()

    scaled_rope_on_the_host()
    jobs = [Job(load(Path(path))) for path in paths]
    built: dict[str, Any] = {}
    for job in jobs:
        if (same := _trained(job.recipe)) not in built:
            built[same] = [trainer(job, rank) for rank in ranks(job.recipe)]
    be_vllm_for_gpus()
    for path, job in zip(paths, jobs, strict=True):
        line = {"recipe": path, "ranks": built[_trained(job.recipe)], "engine": engine(job)}
        print(json.dumps(line), flush=True)


def _trained(recipe: Any) -> str:
    """Return what decides what a trainer's ranks build."""
    parts = (recipe.model, recipe.teacher, recipe.parallel, recipe.optimizer, recipe.lora, recipe.world_size)
    return str(parts)


if __name__ == "__main__":
    main(sys.argv[1:])
