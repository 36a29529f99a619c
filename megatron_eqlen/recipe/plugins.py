"""Import a user's own objects, which a recipe names by import path: ``package.module:name``."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
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
    """Return those options of ``key``, as a file has them, that ``taker`` has annotated parameters for, each
    as its annotation says, or as JSON has it. Raises ValueError, naming the option, its type and what was
    found."""
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
