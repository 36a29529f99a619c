"""The recipe's rollout settings as vLLM's engine arguments, for the engine in this process and for
servers."""

from __future__ import annotations

import json
import logging
import os
from typing import Any

from vllm.platforms import current_platform

from megatron_eqlen.hf.config import ModelConfig, read_config
from megatron_eqlen.recipe import RolloutRecipe

ROUTES_WORKER = "megatron_eqlen.rollout.vllm.engine.routes.RoutesWorker"
ROUTES_SCHEDULER = "megatron_eqlen.rollout.vllm.engine.routes.scheduler"
"""Worker and scheduler of an engine that records routes with vLLM's V1 model runner."""
RUNNER = {"VLLM_USE_V2_MODEL_RUNNER": os.environ.get("VLLM_USE_V2_MODEL_RUNNER", "0")}
"""Selects the V1 model runner where the environment does not ask for V2."""

BATCH_INVARIANT = "VLLM_BATCH_INVARIANT"
"""Variable that selects vLLM's batch-invariant kernels; read when vLLM is imported."""
UNQUANTIZED = [r"re:.*\.gate$", r"re:.*\.in_proj_(b|a|ba)$"]
"""Small matrices that stay in bfloat16 with ``rollout.quantization``, as in Qwen's FP8 releases: routers, and
the gates of Gated DeltaNet. Embeddings and the output layer stay so as well; vLLM quantizes neither."""

logger = logging.getLogger(__name__)


def engine_args(model_path: str, rollout: RolloutRecipe, dtype: str, max_model_len: int) -> dict[str, Any]:
    """Return fields of vLLM 0.32's ``EngineArgs``. ``dtype`` is ``float32`` or ``bfloat16``. Raises
    ValueError for settings that vLLM does not support on this machine."""
    cpu = current_platform.is_cpu()
    kv_gib = rollout.kv_cache_gib or (1.0 if cpu else None)
    model = read_config(model_path)
    args: dict[str, Any] = {
        "model": model_path,
        "dtype": _supported_dtype(model_path, model, dtype),
        "skip_tokenizer_init": True,
        "max_model_len": max_model_len,
        "max_num_seqs": rollout.max_num_seqs,
        "max_num_batched_tokens": rollout.max_num_batched_tokens,
        "block_size": rollout.block_size,
        "enable_prefix_caching": True,
        "gpu_memory_utilization": rollout.gpu_memory_utilization,
        "tensor_parallel_size": rollout.tensor_parallel,
        "enforce_eager": cpu,
        "generation_config": "vllm",
    }
    if rollout.keep_routes:
        args |= _routes_args(rollout)
    if rollout.quantization:
        args |= _quantization_args(model)
    if rollout.batch_invariant:
        _require_batch_invariant_kernels(rollout)
    if kv_gib:
        args["kv_cache_memory_bytes"] = int(kv_gib * 2**30)
    if model.has_yarn:  # vLLM takes max_position_embeddings for the scaled length, Qwen3's keep it
        args["hf_overrides"] = {"max_position_embeddings": model.context_length}
    return args


def environ(rollout: RolloutRecipe) -> dict[str, str]:
    """Return the environment variables that vLLM needs with these settings."""
    return RUNNER | ({BATCH_INVARIANT: "1"} if rollout.batch_invariant else {})


def _routes_args(rollout: RolloutRecipe) -> dict[str, Any]:
    """Return the arguments of an engine that records routes. vLLM records them itself only with its V2 model
    runner, and gives them to the scheduler of the first rank alone; colocated replicas have a scheduler in
    each rank."""
    if RUNNER["VLLM_USE_V2_MODEL_RUNNER"] == "0":
        return {"worker_cls": ROUTES_WORKER, "scheduler_cls": ROUTES_SCHEDULER}
    if rollout.engine == "colocated" and rollout.tensor_parallel > 1:
        raise ValueError(
            f"rollout.keep_routes: expected vLLM's V1 model runner (VLLM_USE_V2_MODEL_RUNNER=0) with "
            f"rollout.engine: colocated and rollout.tensor_parallel: {rollout.tensor_parallel}, found V2"
        )
    return {"enable_return_routed_experts": True}


def _quantization_args(model: ModelConfig) -> dict[str, Any]:
    """Return the arguments of online fp8 quantization. vLLM's blockwise kernels for CPUs need AMX; without
    AMX there is one with a scale for each row of weights, in torch, for dense models."""
    if current_platform.is_cpu() and model.experts:
        raise ValueError(
            f"rollout.quantization: fp8: vLLM's CPU build has no fp8 kernel for the experts of a "
            f"{model.model_type} model"
        )
    scales = "fp8_per_channel" if current_platform.is_cpu() else "fp8_per_block"
    return {"quantization": scales, "quantization_config": {"ignore": UNQUANTIZED}}


def _require_batch_invariant_kernels(rollout: RolloutRecipe) -> None:
    """Raise ValueError unless this machine's GPU has batch-invariant kernels. On GPUs before Hopper vLLM
    replaces ``aten::linear`` in the whole process by a kernel without a backward pass, so a trainer cannot
    share the process."""
    least = 9 if rollout.engine == "colocated" else 8
    if not current_platform.is_cuda() or not current_platform.has_device_capability(10 * least):
        raise ValueError(
            f"rollout.batch_invariant: true with rollout.engine: {rollout.engine} needs an NVIDIA GPU of "
            f"compute capability {least}.0, found {current_platform.get_device_name()}"
        )


def as_flags(args: dict[str, Any]) -> list[str]:
    """Return engine arguments as command-line flags."""
    flags = []
    for name, value in args.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            flags += [f"--{flag}", json.dumps(value) if isinstance(value, dict) else str(value)]
    return flags


def _supported_dtype(model_path: str, model: ModelConfig, dtype: str) -> str:
    """Return the dtype that vLLM supports: on CPUs its Gated DeltaNet has only a bfloat16 kernel."""
    if current_platform.is_cpu() and model.delta_net and dtype != "bfloat16":
        logger.warning("%s: vLLM rolls Gated DeltaNet out in bfloat16 on CPUs, not in %s", model_path, dtype)
        return "bfloat16"
    return dtype
