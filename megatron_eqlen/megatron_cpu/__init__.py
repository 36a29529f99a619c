"""Megatron-Core on a machine without CUDA: the same source, its devices rewritten while it is imported.

``install()`` puts a finder in front of Python's own for ``megatron.core`` alone. Each of its modules
then goes through at most two steps:

1. Without CUDA, ``source.py`` rewrites what names a CUDA device: ``torch.cuda`` becomes the namespace
   in ``cuda_namespace.py``, ``"cuda"`` becomes ``"cpu"``. No cost per step, nothing outside
   ``megatron.core`` changes.
2. ``gaps.py`` closes the known gaps of Megatron-Core 0.16.1. Some of them bite on GPUs as well.

With CUDA step 1 is left out and Megatron-Core runs as it is.
"""

import sys

import torch

from megatron_eqlen.megatron_cpu import gaps
from megatron_eqlen.megatron_cpu.finder import MegatronFinder


def install() -> None:
    """Prepare this process for Megatron-Core; call before its first import. Calling again is free."""
    if any(isinstance(finder, MegatronFinder) for finder in sys.meta_path):
        return
    if "megatron.core" in sys.modules:
        raise ImportError(
            "megatron.core was imported before megatron_eqlen: import megatron_eqlen.models first"
        )
    on_cpu = not torch.cuda.is_available()
    if on_cpu:
        gaps.quiet()
    sys.meta_path.insert(0, MegatronFinder(rewrite=on_cpu))
