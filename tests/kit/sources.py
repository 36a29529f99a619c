"""Definitions in the sources of packages, found without importing them: names, signatures, base classes."""

from __future__ import annotations

import ast
import os
import site
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

FOR_GPUS = Path(os.environ.get("EQLEN_GPU_PACKAGES", Path(__file__).parents[2] / ".venv/gpuless"))
"""Unpacked wheels for GPUs (``tools/gpuless``); elsewhere this folder does not exist, and vLLM is read in its
build for CPUs, whose Python files are the same but for its version."""
ROOTS = (FOR_GPUS / "imported", FOR_GPUS / "read", *map(Path, site.getsitepackages()))
"""Folders of packages; Megatron-Core is the same with and without GPUs."""
Function = ast.FunctionDef | ast.AsyncFunctionDef


_followed: list[tuple[str, str]] = []
"""Names whose definitions are being looked for."""


@dataclass(frozen=True)
class Definition:
    """A name of a module; ``module`` is where it is defined."""

    module: str
    node: ast.AST


def source(module: str) -> Path | None:
    """Return the module's file; None if there is none."""
    paths = [root.joinpath(*module.split(".")) for root in ROOTS]
    candidates = (file for path in paths for file in (path / "__init__.py", path.with_suffix(".py")))
    return next((file for file in candidates if file.exists()), None)


@cache
def tree(file: Path) -> ast.Module:
    """Return a file's syntax tree."""
    return ast.parse(file.read_text())


@cache
def definition(module: str, name: str) -> Definition | None:
    """Return the definition of ``module``'s name; imports are followed within the packages. A name whose
    import cannot be followed is defined by the import."""
    file = source(module)
    if file is None or (module, name) in _followed:  # modules that import all of each other
        return None
    _followed.append((module, name))
    last = None
    for node in _statements(tree(file)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and node.name == name:
            last = Definition(module, node)
        elif isinstance(node, ast.ImportFrom):
            origin = _absolute(module, node, file)
            for alias in node.names:
                if (alias.asname or alias.name) == name or alias.name == "*":
                    target = name if alias.name == "*" else alias.name
                    everything = alias.name == "*" and not _may_define(origin, name)
                    found = None if everything or origin == module else definition(origin, target)
                    if found or alias.name != "*":
                        last = found or Definition(module, node)
        elif name in _bound(node):
            last = Definition(module, node)
    _followed.pop()
    if last is None and source(f"{module}.{name}"):
        return Definition(f"{module}.{name}", ast.Module([], []))
    return last


def bases(found: Definition) -> Iterator[Definition]:
    """Yield a class and its bases, as far as they can be followed."""
    yield found
    assert isinstance(found.node, ast.ClassDef)
    for base in found.node.bases:
        base = base.value if isinstance(base, ast.Subscript) else base  # Generic[T]
        parent = resolve(found.module, base)
        if parent is not None and isinstance(parent.node, ast.ClassDef):
            yield from bases(parent)


def resolve(module: str, expression: ast.expr) -> Definition | None:
    """Return the definition that ``name`` or ``module.name`` stands for in ``module``."""
    if isinstance(expression, ast.Name):
        return definition(module, expression.id)
    if not isinstance(expression, ast.Attribute):
        return None
    dotted = ast.unparse(expression.value)
    for node in _statements(tree(_file(module))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if dotted == (alias.asname or alias.name):
                    return definition(alias.name, expression.attr)
    owner = resolve(module, expression.value)
    return owner and definition(owner.module, expression.attr)


def complete(found: Definition) -> bool:
    """Return True if all bases of a class are known, or are Python's or torch's."""
    known = {"object", "ABC", "Protocol", "NamedTuple", "nn.Module", "torch.nn.Module", "Module", "Enum"}
    for each in bases(found):
        assert isinstance(each.node, ast.ClassDef)
        for base in each.node.bases:
            if ast.unparse(base) not in known and not ast.unparse(base).startswith(("Generic", "Protocol")):
                parent = resolve(each.module, base)
                if parent is None or not isinstance(parent.node, ast.ClassDef):
                    return False
    return True


def method(found: Definition, name: str) -> Function | None:
    """Return a method of a class or of its bases."""
    for each in bases(found):
        for node in _statements(each.node):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name == name:
                return node
    return None


def fields(found: Definition) -> set[str]:
    """Return the annotated names of a class and its bases: a data class's arguments."""
    return {
        node.target.id
        for each in bases(found)
        for node in _statements(each.node)
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }


def attributes(found: Definition) -> set[str]:
    """Return the names that objects of a class have, or that its methods give them: fields and methods."""
    names = fields(found)
    for each in bases(found):
        for node in ast.walk(each.node):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                names.add(node.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                names |= {node.attr} if ast.unparse(node.value) == "self" else set()
    return names


def parameters(function: Function) -> list[str]:
    """Return the names of a function's parameters; ``*args`` and ``**kwargs`` with their stars."""
    own = function.args
    names = [argument.arg for argument in (*own.posonlyargs, *own.args)]
    names += [f"*{own.vararg.arg}"] if own.vararg else []
    names += [argument.arg for argument in own.kwonlyargs]
    return names + ([f"**{own.kwarg.arg}"] if own.kwarg else [])


def _may_define(module: str, name: str) -> bool:
    """Return False if the text of a file that imports nothing else whole lacks the name."""
    file = source(module)
    return file is None or file.name == "__init__.py" or name in file.read_text()


def _file(module: str) -> Path:
    file = source(module)
    assert file is not None, module
    return file


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the statements of a module or class, those under ``if`` and ``try`` included."""
    for child in ast.iter_child_nodes(node):
        yield child
        if isinstance(child, (ast.If, ast.Try, ast.With, ast.ExceptHandler)):
            yield from _statements(child)


def _bound(node: ast.AST) -> set[str]:
    """Return the names that an assignment or import binds; keys of a table of lazy imports count."""
    if isinstance(node, ast.Import):
        return {(alias.asname or alias.name).split(".")[0] for alias in node.names}
    if not isinstance(node, (ast.Assign, ast.AnnAssign)):
        return set()
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    names = {each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name)}
    if isinstance(node.value, ast.Dict):
        names |= {str(key.value) for key in node.value.keys if isinstance(key, ast.Constant)}
    return names


def _absolute(module: str, node: ast.ImportFrom, file: Path) -> str:
    if not node.level:
        return node.module or ""
    package = module.split(".") if file.name == "__init__.py" else module.split(".")[:-1]
    kept = package[: len(package) - node.level + 1]
    return ".".join([*kept, *([node.module] if node.module else [])])
