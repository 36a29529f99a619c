"""Loader of the modules of ``megatron.core``. Without CUDA it rewrites a module's source:

============================  ==================================================================
``torch.cuda``                the module ``cuda_namespace``
``from torch.cuda import x``  ``from cuda_namespace import x``
``"cuda"``, ``"cuda:0"``      ``"cpu"``
``"torch.cuda.FloatTensor"``  ``"torch.FloatTensor"`` (the string form of a tensor type)
``tensor.cuda(...)``          ``tensor``
``tensor.is_cuda``            ``True`` (guards of paths that work as well on CPU tensors)
``torch.compile``             ``cuda_namespace.compile``: the function as it is
============================  ==================================================================

Compiling needs a C++ compiler and gains nothing on a CPU, and importing torch's compilers takes seconds.
"""

from __future__ import annotations

import ast
import importlib.machinery
import types
import zlib
from pathlib import Path
from typing import Any

from megatron_eqlen.megatron_cpu import gaps

CACHE = f".cpu-{zlib.crc32(Path(__file__).read_bytes()):08x}.pyc"
"""End of the names of compiled rewritten modules: only this version of this file without CUDA loads them."""


class MegatronLoader(importlib.machinery.SourceFileLoader):
    """Loader that compiles a rewritten module if ``rewrite``, then closes the module's gaps."""

    def __init__(self, name: str, path: str, rewrite: bool) -> None:
        super().__init__(name, path)
        self.rewrite = rewrite

    def source_to_code(self, data: Any, path: Any) -> types.CodeType:
        text = bytes(data)
        if not (self.rewrite and (b"cuda" in text or b"torch.compile" in text)):  # nothing to rewrite
            return super().source_to_code(data, path)
        return compile(without_cuda(text, path), path, "exec", dont_inherit=True)

    def get_data(self, path: str) -> bytes:
        return super().get_data(self._own(path))

    def set_data(self, path: str, data: Any, *, _mode: int = 0o666) -> None:
        super().set_data(self._own(path), data, _mode=_mode)

    def _own(self, path: str) -> str:
        """Return where Python's cache file ``path`` lies for this loader."""
        return path.removesuffix(".pyc") + CACHE if self.rewrite and path.endswith(".pyc") else path

    def exec_module(self, module: types.ModuleType) -> None:
        super().exec_module(module)
        gaps.close(module, on_cpu=self.rewrite)


NAMESPACE = "megatron_eqlen.megatron_cpu.cuda_namespace"
ALIAS = "_cuda_namespace"  # two leading underscores would be mangled inside classes


def without_cuda(text: bytes, path: str) -> ast.Module:
    """Return the rewritten syntax tree of the source ``text`` of the file ``path``."""
    tree = _Rewriter().visit(ast.parse(text, path))
    tree.body.insert(_after_header(tree.body), ast.Import([ast.alias(NAMESPACE, ALIAS)]))
    return ast.fix_missing_locations(tree)


def _after_header(body: list[ast.stmt]) -> int:
    """Return where an import may be inserted: after the docstring and the ``__future__`` imports."""
    for i, statement in enumerate(body):
        docstring = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
        future = isinstance(statement, ast.ImportFrom) and statement.module == "__future__"
        if not (docstring or future):
            return i
    return len(body)


def _is_torch(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "torch"


class _Rewriter(ast.NodeTransformer):
    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        self.generic_visit(node)
        if node.attr == "cuda" and _is_torch(node.value):
            return ast.copy_location(ast.Name(ALIAS, ast.Load()), node)
        if node.attr == "compile" and _is_torch(node.value):
            return ast.copy_location(ast.Attribute(ast.Name(ALIAS, ast.Load()), "compile", ast.Load()), node)
        if node.attr == "is_cuda" and isinstance(node.ctx, ast.Load):
            return ast.copy_location(ast.Constant(True), node)
        return node

    def visit_Call(self, node: ast.Call) -> ast.expr:
        called = node.func
        if isinstance(called, ast.Attribute) and called.attr == "cuda" and not _is_torch(called.value):
            return self.visit(called.value)
        self.generic_visit(node)
        return node

    def visit_Constant(self, node: ast.Constant) -> ast.expr:
        text = node.value
        if not isinstance(text, str):
            return node
        if text == "cuda" or text.startswith("cuda:"):
            return ast.copy_location(ast.Constant("cpu"), node)
        if text.startswith("torch.cuda.") and text.endswith("Tensor"):
            return ast.copy_location(ast.Constant(text.replace("torch.cuda.", "torch.")), node)
        return node

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.stmt:
        if node.module == "torch.cuda":
            node.module = NAMESPACE
        return node
