"""An engine in this process, from its start to its end: vLLM 0.32 and its V1 engine."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.device_allocator import alloc_conf
from vllm.distributed import parallel_state
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload
from vllm.platforms import current_platform
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor import Executor

from megatron_eqlen.engines.containment import contained
from megatron_eqlen.engines.cpu.repack import repack
from megatron_eqlen.engines.vllm_args import engine_args, environ
from megatron_eqlen.hf.config import read_config
from megatron_eqlen.processes.collector import importing
from megatron_eqlen.recipe import RolloutRecipe, layout

SLEEPING = ("enable_sleep_mode", "enable_nccl_comm_suspend", "sleep_mode_offload_cudagraph")
"""vLLM's switches for what leaves the GPU during sleep: weights and KV cache, NCCL buffers, CUDA graphs."""

_live_engines = 0
_owns_process_group = False


def build(model_path: str, rollout: RolloutRecipe, dtype: str, max_model_len: int, seed: int) -> EngineCore:
    """Build an in-process engine. If torch.distributed is initialized, every rank must call this: groups of
    ``rollout.tensor_parallel`` neighbouring ranks become one replica each (vLLM's external launcher). vLLM's
    ``LLM`` is left out: its end would take down the trainer's process groups."""
    global _live_engines, _owns_process_group
    # a default group that an earlier engine made for itself is no trainer's
    launched = dist.is_initialized() and not _owns_process_group
    ranks = dist.get_world_size() if launched else 1
    layout.require(layout.replicas(rollout, int(os.environ.get("LOCAL_WORLD_SIZE", ranks))))
    layout.require(layout.engine(rollout, read_config(model_path)))
    cpu = current_platform.is_cpu()
    with contained(), importing(), nullcontext() if cpu else whole_segments():
        if launched:
            # the external launcher reads torchrun's variables
            os.environ["RANK"] = str(dist.get_rank())
            os.environ.setdefault("LOCAL_RANK", "0" if cpu else str(torch.cuda.current_device()))
        else:
            _owns_process_group = True
        config = configuration(model_path, rollout, dtype, max_model_len, seed, launched)
        with _naming(rollout, max_model_len):
            core = EngineCore(config, Executor.get_class(config), log_stats=False)
    _live_engines += 1
    return core


def configuration(
    model_path: str, rollout: RolloutRecipe, dtype: str, max_model_len: int, seed: int, launched: bool = False
) -> VllmConfig:
    """Return vLLM's configuration of an engine. Raises ValueError for what vLLM refuses."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.update(environ(rollout))
    args: dict[str, Any] = dict.fromkeys(SLEEPING, not current_platform.is_cpu())
    args |= engine_args(model_path, rollout, dtype, max_model_len)
    with _naming(rollout, max_model_len):
        return EngineArgs(
            **args,
            seed=seed,
            distributed_executor_backend="external_launcher" if launched else "uni",
            use_tqdm_on_load=False,
        ).create_engine_config(UsageContext.LLM_CLASS)


@contextmanager
def _naming(rollout: RolloutRecipe, max_model_len: int) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        memory = f"{rollout.kv_cache_gib}, rollout.gpu_memory_utilization {rollout.gpu_memory_utilization}"
        sizes = f"rollout.block_size {rollout.block_size} and paths of {max_model_len} tokens"
        given = f"{memory}, {sizes}{f' and {rollout.vllm}' * bool(rollout.vllm)}"
        raise ValueError(f"vLLM does not start with rollout.kv_cache_gib {given}: {error}") from error


@contextmanager
def whole_segments() -> Iterator[None]:
    """Switch PyTorch's expandable segments off in the block: vLLM's all-reduce shares the memory of its CUDA
    graphs with other processes, and CUDA shares none of an expandable segment."""
    before = alloc_conf.current_alloc_conf()
    if not alloc_conf.conf_flag_enabled(before, alloc_conf.EXPANDABLE_SEGMENTS):
        yield
        return
    alloc_conf.set_alloc_conf(alloc_conf.with_conf_flag(before, alloc_conf.EXPANDABLE_SEGMENTS, False))
    try:
        yield
    finally:
        alloc_conf.set_alloc_conf(before)


def close(core: EngineCore) -> None:
    """Stop the engine; with the last one, take down vLLM's process groups. ``EngineCore.shutdown`` would take
    down the trainer's, too. vLLM's group of all ranks stays beside a trainer's for the next engine."""
    global _live_engines, _owns_process_group
    with contained():
        core.model_executor.shutdown()
        core.scheduler.shutdown()
        # vLLM froze the collector's objects as it started
        gc.unfreeze()
        _live_engines -= 1
        if _live_engines:
            return
        parallel_state.destroy_model_parallel()
        if _owns_process_group:
            parallel_state.destroy_distributed_environment()
            _owns_process_group = False


def load_weights(core: EngineCore, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Stream weights into the running model (vLLM's layerwise reload); after an error load it again."""
    executor: Any = core.model_executor
    runner = executor.driver_worker.worker.model_runner
    with contained():
        try:
            core.collective_rpc("reload_weights", kwargs={"weights_iterator": named_tensors})
        finally:  # no effect after a complete reload
            with set_current_vllm_config(runner.vllm_config):
                finalize_layerwise_reload(runner.get_model(), runner.model_config)
        repack(runner.get_model())
