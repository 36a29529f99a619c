"""A user's own objects, named by import path, ``package.module:name``: import them, type their options, and
tell whether their code has changed.

Digests are of the object and what it uses of the user's modules; comments, layout and other statements may
change. Names made at run time and files that code reads are not followed (docs/extending.md).
"""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import re
import sys
import sysconfig
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import cache
from hashlib import sha256
from importlib.util import find_spec, resolve_name
from itertools import chain
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
    of = getattr(taker.__init__ if inspect.isclass(taker) else taker, "__globals__", {})
    found: dict[str, Any] = {}
    for name, parameter in inspect.signature(taker).parameters.items():
        kind = parameter.annotation
        if name not in options or kind is parameter.empty:
            continue
        with suppress(NameError, PydanticUserError):  # a name for type checkers alone, or a class of its own
            adapter = TypeAdapter(eval(kind, of) if isinstance(kind, str) else kind)
            try:
                found[name] = adapter.dump_python(_read(adapter, options[name]), mode=mode)
            except ValidationError:
                shown = kind if isinstance(kind, str) else inspect.formatannotation(kind)
                raise ValueError(f"{key}.{name}: expected {shown}, found {options[name]!r:.200}") from None
    return found


def _read(adapter: TypeAdapter, value: Any) -> Any:
    """Return a value as it is spelt if that is of the type, or else what its text says."""
    try:
        return adapter.validate_python(TypeAdapter(Tree).validate_python(value), strict=True)
    except ValidationError:
        return adapter.validate_python(value)


OTHERS = [Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "purelib", "platlib")]
OTHERS.append(Path(__file__).parents[1])
"""Folders of Python, of installed packages and of this one."""


def digests(path: str) -> dict[str, str]:
    """Return digests of the object ``module:name``, by "", and of all it uses, by ``module:name``; {} for
    others' objects."""
    module, _, name = path.partition(":")
    code, due = _Code(cache(_source), {}), {(module, name)}
    while due:
        for each in due:
            code.follow(*each)
        due = code.registered()
    texts = {key: "\n".join(text for _, text in sorted(found)) for key, found in code.found.items()}
    return {key if key != path else "": sha256(text.encode()).hexdigest() for key, text in texts.items()}


class _Code:
    """Statements of the user's modules that are used, by ``module:name`` in ``found``."""

    def __init__(
        self, source: Callable[[str], Path | None], trees: dict[str, list[tuple[set[str], ast.stmt]]]
    ) -> None:
        self.source, self.trees = source, trees
        self.found: defaultdict[str, set[tuple[int, str]]] = defaultdict(set)
        self.data = set[str]()
        """Names in ``found`` that may be registries: no functions, and used by more than decorators."""
        self._seen = set[tuple[str, str, bool]]()

    def follow(self, module: str, name: str) -> _Code:
        """Add what an object uses, ``name`` "": a module."""
        due = [(module, name, True)]
        while due:
            module, used, reads = due.pop()
            if (module, used, reads) in self._seen or (file := self.source(module)) is None:
                continue
            self._seen.add((module, used, reads))
            if module not in self.trees:
                self.trees[module] = [(_bound(statement), statement) for statement in _statements(file)]
            tree = self.trees[module]
            name, _, rest = used.partition(".")
            names = {name, "*", "__getattr__"}
            known = [(at, each) for at, (bound, each) in enumerate(tree) if not used or bound & names]
            if name and not known:  # a module of this package
                due.append((f"{module}.{name}", rest, reads))
            for at, statement in known:
                if isinstance(statement, ast.Import | ast.ImportFrom):
                    for target, inside, bound in _imported(statement, module):
                        if not used or bound in (name, "*"):
                            inside = name if inside == "*" else inside
                            self.found[f"{module}:{name}"].add((at, f"{target}:{inside}"))
                            due.append((target, ".".join(filter(None, (inside, rest))), reads))
                    continue
                self.found[f"{module}:{name}"].add((at, ast.unparse(statement)))
                if reads and not isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
                    self.data.add(f"{module}:{name}")
                writers = {*_writers(statement)}
                due += [(module, one, reads and one not in writers) for one in _uses(statement)]
                for each in ast.walk(statement):
                    due += [(to, inside.strip("*"), reads) for to, inside, _ in _imported(each, module)]
        return self

    def registered(self) -> set[tuple[str, str]]:
        """Return what acts on import and is not in ``found``: modules imported for effect, and what
        decorators or calls put into ``data``."""
        due = set[tuple[str, str]]()
        data_of = cache(lambda module, writer: _Code(self.source, self.trees).follow(module, writer).data)
        for module, tree in [*self.trees.items()]:
            due |= {(target, "") for target in _for_effect([each for _, each in tree], module)}
            for bound, statement in tree:
                for writer in _writers(statement):
                    if self.data & data_of(module, writer):
                        due |= {(module, name) for name in bound}
        return {each for each in due if self.source(each[0]) and (*each, True) not in self._seen}


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


def _statements(file: Path) -> list[ast.stmt]:
    """Return the statements of a module without those that run it as a script."""
    try:
        body = ast.parse(file.read_bytes()).body if file.is_file() else []
    except SyntaxError as error:
        raise ValueError(f"{file}:{error.lineno}: {error.msg}") from None
    return [
        *chain.from_iterable(
            each.orelse if isinstance(each, ast.If) and ast.unparse(each.test) == SCRIPT else [each]
            for each in body
        )
    ]


def _bound(statement: ast.stmt) -> set[str]:
    """Return the names that a statement of a module binds or, as ``TABLE.update(...)`` may, changes."""
    nodes = [statement]
    if isinstance(statement, ast.Assign | ast.AnnAssign | ast.AugAssign):
        nodes = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
    names = set[str]()
    for node in (
        nodes if isinstance(statement, DEFINITIONS) else (n for each in nodes for n in ast.walk(each))
    ):
        if isinstance(node, ast.Name):
            names.add(node.id)
        elif isinstance(node, DEFINITIONS):
            names.add(node.name)
        elif isinstance(node, ast.alias):
            names.add(node.asname or node.name.partition(".")[0])
    return names


SCRIPT = "__name__ == '__main__'"
DEFINITIONS = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def _writers(statement: ast.stmt) -> Iterator[str]:
    """Yield what a statement calls on import that may put it into a registry: a class's base, too."""
    if isinstance(statement, DEFINITIONS):
        for each in (*statement.decorator_list, *getattr(statement, "bases", ())):
            yield from _uses(each.func if isinstance(each, ast.Call) else each)
    elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        yield from _uses(statement.value.func)


def _for_effect(statements: list[ast.stmt], module: str) -> Iterator[str]:
    """Yield modules that a module imports and does not use by name: what they do on import is why."""
    used = {one.partition(".")[0] for each in statements for one in _uses(each)}
    imported = (one for each in statements for one in _imported(each, module))
    yield from (target for target, inside, bound in imported if not inside and bound not in used)


def _uses(node: ast.AST) -> Iterator[str]:
    """Yield names with their attributes: ``helpers.clean``."""
    text = ast.unparse(node) if isinstance(node, ast.Name | ast.Attribute) else ""
    if re.fullmatch(r"[\w.]+", text):
        yield text
    else:
        for child in ast.iter_child_nodes(node):
            yield from _uses(child)


def _imported(node: ast.AST, module: str) -> Iterator[tuple[str, str, str]]:
    """Yield, for each import, the module, the name in it, and the name that it gets here."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            first = alias.name.partition(".")[0]
            for target in {alias.name} | ({first} if not alias.asname else set()):
                yield target, "", alias.asname or first
    elif isinstance(node, ast.ImportFrom):
        spec = find_spec(module)
        package = spec.parent if spec and spec.parent is not None else ""
        target = resolve_name("." * node.level + (node.module or ""), package)
        for alias in node.names:
            yield target, alias.name, alias.asname or alias.name
            yield f"{target}.{alias.name}", "", alias.asname or alias.name
    elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
        yield from ((str(each.value), "", "") for each in node.args[:1] if isinstance(each, ast.Constant))
