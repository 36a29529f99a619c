"""Megatron-Core on a machine without CUDA: the same source, its devices rewritten while it is imported.

``install()`` puts a finder in front of Python's own for ``megatron.core`` alone. Each of its modules
then goes through at most two steps:

1. Without CUDA, ``source.py`` rewrites what names a CUDA device: ``torch.cuda`` becomes the namespace
   in ``cuda_namespace.py``, ``"cuda"`` becomes ``"cpu"``. No cost per step, nothing outside
   ``megatron.core`` changes.
2. ``gaps.py`` closes the known gaps of Megatron-Core 0.16.1. Some of them concern GPUs as well.

With CUDA step 1 is left out and Megatron-Core runs as it is. Nothing heavy is imported before
``megatron.core`` is: a model's configuration can be read without torch.
"""

import sys
from collections.abc import Sequence
from functools import cache
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


def install() -> None:
    """Prepare this process for Megatron-Core; call before its first import. Calling again is free."""
    if any(isinstance(finder, _MegatronCore) for finder in sys.meta_path):
        return
    if "megatron.core" in sys.modules:
        raise ImportError(
            "megatron.core was imported before megatron_eqlen: import megatron_eqlen.models first"
        )
    sys.meta_path.insert(0, _MegatronCore())


class _MegatronCore(MetaPathFinder):
    """Hands ``megatron.core`` to ``MegatronFinder``, which is made when the first module is asked for."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != "megatron.core" and not fullname.startswith("megatron.core."):
            return None
        return _finder().find_spec(fullname, path, target)


@cache
def _finder() -> MetaPathFinder:
    import torch

    from megatron_eqlen.megatron_cpu import gaps, packages
    from megatron_eqlen.megatron_cpu.finder import MegatronFinder

    packages.leave_out_broken()
    on_cpu = not torch.cuda.is_available()
    if on_cpu:
        gaps.quiet()
    return MegatronFinder(rewrite=on_cpu)
