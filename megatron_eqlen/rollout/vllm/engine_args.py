"""The recipe's rollout settings as vLLM's engine arguments, for the engine in this process and for
servers."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from vllm.platforms import current_platform

from megatron_eqlen.recipe import RolloutRecipe

logger = logging.getLogger(__name__)


def engine_args(model_path: str, rollout: RolloutRecipe, dtype: str, max_model_len: int) -> dict[str, Any]:
    """Fields of vLLM 0.31's ``EngineArgs``. ``dtype`` is ``float32`` or ``bfloat16``."""
    cpu = current_platform.is_cpu()
    kv_gib = rollout.kv_cache_gib or (1.0 if cpu else None)
    args = {
        "model": model_path,
        "dtype": _supported_dtype(model_path, dtype),
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
    return args | ({"kv_cache_memory_bytes": int(kv_gib * 2**30)} if kv_gib else {})


def as_flags(args: dict[str, Any]) -> list[str]:
    """Engine arguments as command-line flags; False ones are left out."""
    flags = []
    for name, value in args.items():
        flag = "--" + name.replace("_", "-")
        if isinstance(value, bool):
            flags += [flag] if value else []
        else:
            flags += [flag, json.dumps(value) if isinstance(value, dict) else str(value)]
    return flags


def _supported_dtype(model_path: str, dtype: str) -> str:
    """On CPUs vLLM's Gated DeltaNet has only a bfloat16 kernel."""
    config = json.loads((Path(model_path) / "config.json").read_text(encoding="utf-8"))
    if current_platform.is_cpu() and config["model_type"] == "qwen3_next" and dtype != "bfloat16":
        logger.warning("%s: vLLM rolls qwen3_next out in bfloat16 on CPUs, not in %s", model_path, dtype)
        return "bfloat16"
    return dtype
