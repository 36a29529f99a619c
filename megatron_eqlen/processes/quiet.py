"""Settings before heavy imports: silence of irrelevant output, and a place for compiled modules."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from pathlib import Path

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
    """Silence libraries, before they are imported; child processes inherit the environment settings."""
    if VERBOSE in os.environ:
        return
    for name, value in ENVIRON.items():
        os.environ.setdefault(name, value)
    for name in LOGGERS:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    warnings.filterwarnings("ignore", ".*reduce_op. is deprecated", FutureWarning)
    warnings.filterwarnings("ignore", "invalid escape", SyntaxWarning)  # when compiled
    warnings.filterwarnings("ignore", ".* is experimental and still under", UserWarning)
    warnings.filterwarnings("ignore", ".*numa_migrate_pages failed", UserWarning)
    # Megatron-Core reads checkpoints without collectives
    warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or unin", UserWarning)
    warnings.filterwarnings("ignore", "The argument order of .* has been changed", UserWarning)
    warnings.filterwarnings("ignore", ".*attribute of a Tensor that is not a leaf", UserWarning)


def keep_bytecode() -> None:
    """Keep what is compiled in ``bytecode`` of the virtual environment where it may not lie beside the
    sources: else each rank compiles all modules again, 10 CPU-seconds. Call before heavy imports."""
    if sys.dont_write_bytecode and sys.pycache_prefix is None and os.access(sys.prefix, os.W_OK):
        sys.dont_write_bytecode, sys.pycache_prefix = False, str(Path(sys.prefix, "bytecode"))
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix
