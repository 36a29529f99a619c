"""Import hook that finds ``megatron.core`` modules and gives them a loader that prepares them."""

import importlib.abc
import importlib.machinery
import types
from collections.abc import Sequence
from importlib.machinery import ModuleSpec

from megatron_eqlen.megatron_cpu import gaps, source


class MegatronLoader(importlib.machinery.SourceFileLoader):
    """Loader that compiles a rewritten module if ``rewrite``, then closes the module's gaps.

    Rewritten code is compiled anew in every process: from Python's own cache, a process with CUDA would load
    it.
    """

    def __init__(self, name: str, path: str, rewrite: bool) -> None:
        super().__init__(name, path)
        self.rewrite = rewrite

    def get_code(self, fullname: str) -> types.CodeType | None:
        path = self.get_filename(fullname)
        if not self.rewrite or not source.names_cuda(text := self.get_data(path)):
            return super().get_code(fullname)
        return compile(source.without_cuda(text, path), path, "exec", dont_inherit=True)

    def exec_module(self, module: types.ModuleType) -> None:
        super().exec_module(module)
        gaps.close(module, on_cpu=self.rewrite)


class MegatronFinder(importlib.abc.MetaPathFinder):
    """Finder of ``megatron.core`` modules, by Python's own path finder."""

    def __init__(self, rewrite: bool) -> None:
        self.rewrite = rewrite

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and type(spec.loader) is importlib.machinery.SourceFileLoader:
            spec.loader = MegatronLoader(spec.loader.name, spec.loader.path, self.rewrite)
        return spec
