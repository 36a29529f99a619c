"""Megatron-Core on a machine without CUDA: the same source, with its devices rewritten during import.

``install()`` puts a finder in front of Python's own, for ``megatron.core`` only. Without CUDA, ``finder.py``
rewrites references to CUDA devices: ``torch.cuda`` becomes the namespace in ``cuda_namespace.py``, ``"cuda"``
becomes ``"cpu"``; nothing changes outside ``megatron.core``. Then, on any machine, ``gaps.py`` closes known
gaps of Megatron-Core 0.19.2. Nothing heavy is imported before ``megatron.core``.
"""

import sys
from collections.abc import Callable, Sequence
from functools import cache, partial
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType


def install() -> None:
    """Prepare this process for Megatron-Core. Call before its first import; further calls have no effect."""
    if any(isinstance(finder, _MegatronCore) for finder in sys.meta_path):
        return
    if "megatron.core" in sys.modules:
        remedy = "import megatron_eqlen.models first"
        raise ImportError(f"megatron.core was imported before megatron_eqlen: {remedy}")
    sys.meta_path.insert(0, _MegatronCore())


class _MegatronCore(MetaPathFinder):
    """Finder of ``megatron.core`` modules, by Python's own path finder, with a loader that prepares them."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != "megatron.core" and not fullname.startswith("megatron.core."):
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and type(spec.loader) is SourceFileLoader:
            spec.loader = _loader()(spec.loader.name, spec.loader.path)
        return spec


@cache
def _loader() -> Callable[[str, str], Loader]:
    """Return the loader of (name, path); made for the first module."""
    import torch

    from megatron_eqlen.megatron_cpu import gaps, packages
    from megatron_eqlen.megatron_cpu.finder import MegatronLoader

    on_cpu = not torch.cuda.is_available()
    packages.leave_out_broken(on_cpu)
    if on_cpu:
        gaps.quiet()
    return partial(MegatronLoader, rewrite=on_cpu)
