"""Silence repetitive and irrelevant output of libraries, so that a run's own lines can be read."""

from __future__ import annotations

import logging
import os
import warnings

VERBOSE = "EQLEN_VERBOSE"
"""Environment variable: if set (to anything), library output is shown."""
ENVIRON = {
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "TRITON_PRINT_AUTOTUNING": "0",  # vLLM's monitor of compilations switches it on in every rank
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
LOGGERS = (
    "megatron.core.distributed.distributed_data_parallel",  # advises its callers to lay out parameters
    "megatron.core.dist_checkpointing.strategies.torch",  # advises another way to save
    "torch._library.triton",
    "torch.distributed.elastic",
    "torch.distributed.elastic.agent.server.api",
    "torch.distributed.launcher.api",
    "torch.utils.cpp_extension",
    "vllm.triton_utils.importing",  # says that Triton has no backend for CPUs
)


def quiet() -> None:
    """Silence the libraries. Call before they are imported; child processes inherit the environment
    settings."""
    if VERBOSE in os.environ:
        return
    for name, value in ENVIRON.items():
        os.environ.setdefault(name, value)
    for name in LOGGERS:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    warnings.filterwarnings("ignore", category=FutureWarning, message=".*reduce_op. is deprecated")
    warnings.filterwarnings("ignore", category=SyntaxWarning, message="invalid escape")  # when compiled
    warnings.filterwarnings("ignore", category=UserWarning, message=".* is experimental and still under")
    warnings.filterwarnings("ignore", category=UserWarning, message=".*numa_migrate_pages failed")
    warnings.filterwarnings(
        "ignore", category=UserWarning, message=".*attribute of a Tensor that is not a leaf"
    )
