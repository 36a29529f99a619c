"""The recipe's rollout settings as vLLM's engine arguments, for the engine in this process and servers."""

from __future__ import annotations

import json
import logging
import os
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from typing import Any

from vllm.platforms import current_platform
from vllm.utils.flashinfer import has_flashinfer

from megatron_eqlen.hf.config import ModelConfig, read_config
from megatron_eqlen.recipe import RolloutRecipe
from megatron_eqlen.recipe.contents import function
from megatron_eqlen.tokens import MOST_PER_TOKEN

VLLM_SAMPLES = not current_platform.is_cpu()
"""True where vLLM samples, masks and records routes itself: in its V2 model runner, which needs a GPU."""
REFERENCE = "megatron_eqlen.engines.cpu.runner.Reference"
STARTED_WITH = ("keep_sampling_mask", "keep_routes", "batch_invariant", "quantization", "vllm")
"""Keys of ``rollout`` that an engine must be started with, to use them."""
FUNCTION = "function"
"""Key beside these: what the engine computes (``contents.function``)."""

BATCH_INVARIANT = "VLLM_BATCH_INVARIANT"
"""Variable that selects vLLM's batch-invariant kernels; read when vLLM is imported."""
FLASHINFER_SAMPLER = "VLLM_USE_FLASHINFER_SAMPLER"
FLASHINFER_ALLREDUCE = "VLLM_ALLREDUCE_USE_FLASHINFER"
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
        # of kept tokens, and of the drawn one
        "max_logprobs": MOST_PER_TOKEN + 1,
        "max_model_len": max_model_len,
        "max_num_seqs": rollout.max_num_seqs,
        "max_num_batched_tokens": 8192,
        "block_size": rollout.block_size,
        "enable_prefix_caching": True,
        "gpu_memory_utilization": rollout.gpu_memory_utilization,
        "tensor_parallel_size": rollout.tensor_parallel,
        "enforce_eager": cpu,
        # not the sampling defaults in the model's folder
        "generation_config": "vllm",
        "additional_config": {key: getattr(rollout, key) for key in STARTED_WITH}
        | {FUNCTION: function(Path(model_path), dtype)},
    }
    if VLLM_SAMPLES:
        args |= {
            "logprobs_mode": "processed_logprobs",
            "return_sampling_mask": rollout.keep_sampling_mask,
            "enable_return_routed_experts": rollout.keep_routes,
        }
    else:
        args |= {"worker_cls": f"{REFERENCE}Worker", "scheduler_cls": f"{REFERENCE}Scheduler"}
    if rollout.vllm.get("speculative_config") and not VLLM_SAMPLES:
        raise ValueError("rollout.vllm.speculative_config: expected a GPU, found a CPU, without drafts")
    if rollout.quantization:
        args |= _quantization_args(model)
    if rollout.batch_invariant:
        _require_batch_invariant_kernels(rollout)
    if kv_gib:
        args["kv_cache_memory_bytes"] = int(kv_gib * 2**30)
    if model.has_yarn:  # vLLM takes max_position_embeddings for the scaled length, Qwen3's keep it
        longer = {"max_position_embeddings": model.context_length}
        args["hf_overrides"] = {"text_config": longer} if model.reads_images else longer
    if model.reads_images:
        args["language_model_only"] = True
    return args | rollout.vllm


def environ(rollout: RolloutRecipe) -> dict[str, str]:
    """Return the environment variables that vLLM needs with these settings."""
    runner = {"VLLM_USE_V2_MODEL_RUNNER": "1" if VLLM_SAMPLES else "0"}
    # without nvcc or ninja vLLM leaves out all of FlashInfer but its all-reduce, which would end the engine
    # at its first use; asked before CUDA_HOME is set, as vLLM keeps the answer: the packages' cannot build it
    if VLLM_SAMPLES and not has_flashinfer():
        runner[FLASHINFER_ALLREDUCE] = os.environ.get(FLASHINFER_ALLREDUCE, "0")
    compiler = _cuda_home() if VLLM_SAMPLES and rollout.quantization else {}
    return runner | compiler | ({BATCH_INVARIANT: "1"} if rollout.batch_invariant else {})


def _cuda_home() -> dict[str, str]:
    """Return where DeepGEMM, which compiles fp8 kernels, finds nvcc: among Python's packages (too few to
    build FlashInfer's sampler), unless CUDA_HOME, CUDA_PATH or the PATH names a toolkit."""
    if os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or which("nvcc"):
        return {}
    found = find_spec("nvidia")
    folders = found.submodule_search_locations if found and found.submodule_search_locations else []
    homes = [str(nvcc.parents[1]) for folder in folders for nvcc in Path(folder).glob("cu*/bin/nvcc")]
    sampler = os.environ.get(FLASHINFER_SAMPLER, "0")
    return {"CUDA_HOME": homes[0], FLASHINFER_SAMPLER: sampler} if homes else {}


def _quantization_args(model: ModelConfig) -> dict[str, Any]:
    """Return the arguments of online fp8. Blockwise kernels need AMX; torch's has a scale for each row."""
    if current_platform.is_cpu() and model.experts:
        experts = f"the experts of a {model.model_type} model"
        raise ValueError(f"rollout.quantization: fp8: vLLM's CPU build has no fp8 kernel for {experts}")
    scales = "fp8_per_channel" if current_platform.is_cpu() else "fp8_per_block"
    return {"quantization": scales, "quantization_config": {"ignore": UNQUANTIZED}}


def _require_batch_invariant_kernels(rollout: RolloutRecipe) -> None:
    """Raise ValueError unless this GPU has batch-invariant kernels. Before Hopper, vLLM replaces
    ``aten::linear`` in the whole process by a kernel without a backward pass, so no trainer can be in it."""
    least = 9 if rollout.engine == "colocated" else 8
    if not current_platform.is_cuda() or not current_platform.has_device_capability(10 * least):
        key = f"rollout.batch_invariant: true with rollout.engine: {rollout.engine}"
        found = current_platform.get_device_name()
        raise ValueError(f"{key} needs an NVIDIA GPU of compute capability {least}.0, found {found}")


def as_flags(args: dict[str, Any]) -> list[str]:
    flags = []
    for name, value in args.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, list):
            flags += [f"--{flag}", *map(str, value)]
        else:
            flags += [f"--{flag}", json.dumps(value) if isinstance(value, dict) else str(value)]
    return flags


def _supported_dtype(model_path: str, model: ModelConfig, dtype: str) -> str:
    """Return the dtype that vLLM supports: on CPUs its Gated DeltaNet has only a bfloat16 kernel."""
    if current_platform.is_cpu() and model.delta_net and dtype != "bfloat16":
        logger.warning("%s: vLLM rolls Gated DeltaNet out in bfloat16 on CPUs, not in %s", model_path, dtype)
        return "bfloat16"
    return dtype
