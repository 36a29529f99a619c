"""A user's own objects, named by import path, ``package.module:name``: import them, type their options, and
tell whether their code has changed.

Digests are of the object's module and of the user's modules that it imports, also inside functions, without
comments and layout. Names that are made where the code runs, and files that it reads, are not followed.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from hashlib import sha256
from importlib.util import find_spec, resolve_name
from pathlib import Path
from typing import Any, Literal

from pydantic import PydanticUserError, TypeAdapter, ValidationError

from megatron_eqlen.processes.failures import name_of, text_of
from megatron_eqlen.recipe.yaml_values import Tree


def is_import_path(value: str) -> bool:
    return ":" in value


def load_object(path: str, key: str, expected: type | None = None) -> Any:
    """Return the object that ``package.module:name`` names; the working directory is searched as well.

    ``key``: the recipe's key, for messages. Raises ValueError if the object cannot be imported, does not
    exist, or is not an instance of ``expected`` (None: not callable).
    """
    module, colon, name = path.partition(":")
    if not (module and colon and name):
        raise ValueError(f"{key}: expected package.module:name, found {path!r}")
    if os.getcwd() not in sys.path:  # as for `python -m`, however this process was started
        sys.path.append(os.getcwd())
    try:
        imported = importlib.import_module(module)
        loaded = getattr(imported, name, None)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - the user's own module may raise anything
        is_file = "/" in module or module.endswith(".py")
        dotted = module.removesuffix(".py").strip("./").replace("/", ".")  # rewards/mine.py -> rewards.mine
        as_file = f": a file {module} is named {dotted}:{name}" if is_file else ""
        why = text_of(error) if isinstance(error, ImportError) else name_of(error)
        raise ValueError(f"{key}: {path!r} cannot be imported: {why}{as_file}") from None
    if loaded is None:
        file = getattr(imported, "__file__", "Python's own")
        raise ValueError(f"{key}: {module} has no {name!r} (it is {file})")
    if not (callable(loaded) if expected is None else isinstance(loaded, expected)):
        wanted = "something that can be called" if expected is None else f"a {expected.__name__}"
        raise ValueError(f"{key}: {path!r}: expected {wanted}, found a {type(loaded).__name__}")
    return loaded


def typed(
    options: Mapping[str, Any], key: str, taker: Callable[..., Any], mode: Literal["json", "python"]
) -> dict[str, Any]:
    """Return the options of ``key`` for which ``taker`` has annotated parameters, each of its type, or as
    JSON has it. Raises ValueError, naming the option, its type and what was found."""
    # Annotations may be text (``from __future__``), which names what its own module imports.
    of = getattr(taker.__init__ if inspect.isclass(taker) else taker, "__globals__", {})
    found: dict[str, Any] = {}
    for name, parameter in inspect.signature(taker).parameters.items():
        kind = parameter.annotation
        if name not in options or kind is parameter.empty:
            continue
        with suppress(NameError, PydanticUserError):  # a name for type checkers alone, or a class of its own
            adapter = TypeAdapter(eval(kind, of) if isinstance(kind, str) else kind)
            try:
                value = _read(adapter, options[name])
                found[name] = value if mode == "python" else adapter.dump_python(value, mode="json")
            except ValidationError:
                shown = kind if isinstance(kind, str) else inspect.formatannotation(kind)
                raise ValueError(f"{key}.{name}: expected {shown}, found {options[name]!r:.200}") from None
    return found


def _read(adapter: TypeAdapter, value: Any) -> Any:
    """Return a value as it is spelt if that is of the type, or else what its text says."""
    try:
        # ``5`` is a number for ``int``; ``str`` refuses the number and takes the text below.
        return adapter.validate_python(TypeAdapter(Tree).validate_python(value), strict=True)
    except ValidationError:
        return adapter.validate_python(value)


OTHERS = [Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "purelib", "platlib")]
OTHERS.append(Path(__file__).parents[1])
"""Folders of Python, of installed packages and of this one."""


def digests(path: str) -> dict[str, str]:
    """Return the digest of the module of the object ``module:name``, by "", and of the user's modules that it
    imports, by name; empty for installed ones. Raises ValueError for a file that is no Python."""
    found: dict[str, str] = {}
    first, due = path.partition(":")[0], [path.partition(":")[0]]
    while due:
        module = due.pop()
        if module in found or (file := _source(module)) is None:
            continue
        try:
            # A folder without ``__init__.py`` has no code of its own.
            tree = ast.parse(file.read_bytes() if file.is_file() else b"")
        except SyntaxError as error:
            raise ValueError(f"{file}:{error.lineno}: {error.msg}") from None
        # Unparsed, so that comments and layout do not count.
        found[module] = sha256(ast.unparse(tree).encode()).hexdigest()
        due += [target for node in ast.walk(tree) for target in _imported(node, module)]
    return {"" if module == first else module: digest for module, digest in found.items()}


def _source(module: str) -> Path | None:
    """Return the file of a user's own module, or its folder without ``__init__.py``; None for all others."""
    package = module.rpartition(".")[0]
    if package and _source(package) is None:  # to look inside would import it
        return None
    try:
        spec = find_spec(module)
    except (ImportError, ValueError, TypeError):  # no such module, or one without a specification
        return None
    places = spec and (spec.origin or next(iter(spec.submodule_search_locations or ()), None))
    file = Path(places or "?").resolve()
    ours = (file.is_dir() or file.suffix == ".py") and not any(map(file.is_relative_to, OTHERS))
    return file if ours else None


def _imported(node: ast.AST, module: str) -> Iterator[str]:
    """Yield modules that a statement of ``module`` may import: of ``from a import b`` ``a`` and ``a.b``."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            parts = alias.name.split(".")
            # ``import a.b`` runs ``a``, too.
            yield from (".".join(parts[:end]) for end in range(1, len(parts) + 1))
    elif isinstance(node, ast.ImportFrom):
        spec = find_spec(module)
        package = spec.parent if spec and spec.parent is not None else ""
        target = resolve_name("." * node.level + (node.module or ""), package)
        yield from (target, *(f"{target}.{alias.name}" for alias in node.names))
    elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
        yield from (str(each.value) for each in node.args[:1] if isinstance(each, ast.Constant))
