"""Recipe files: reading, ``extends:``, ``key.sub=value`` overrides, writing. Every error names its key."""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from megatron_eqlen.files import naming
from megatron_eqlen.processes import events
from megatron_eqlen.recipe import Recipe, RecipeError, Section, shown
from megatron_eqlen.recipe.checks import check, check_imports
from megatron_eqlen.recipe.keys import nearest
from megatron_eqlen.recipe.naming import ABLATIONS, MAY_CHANGE, NAMED_ELSEWHERE, differences, is_under, leaves
from megatron_eqlen.recipe.others import read_table
from megatron_eqlen.recipe.plugins import load_object, typed
from megatron_eqlen.recipe.schema import ENVIRONMENTS
from megatron_eqlen.recipe.yaml_values import in_one_line, read_value, to_yaml

MOST_ERRORS = 10
HOLE = "???"
"""Value that is still to be given (``eqlen recipe --from``)."""
RECIPE = "recipe.yaml"
"""File in a run's folder: the resolved recipe."""


RecipeCheck = Callable[[Recipe], None]
"""Check that raises ValueError if keys of a recipe contradict each other."""


def load(path: str | Path, overrides: Sequence[str] = (), checks: Sequence[RecipeCheck] = ()) -> Recipe:
    """Load the recipe in ``path`` with ``key.sub=value`` overrides applied. ``checks`` run after its own,
    such as ``job.load``'s; reading an earlier run's recipe needs none. Raises RecipeError."""
    raw = read_yaml(Path(path))
    if Path(path).name == RECIPE:  # of a run, perhaps of an earlier version
        raw = _carried(raw)
    if raw.keys() >= {"recipes", "methods"}:
        raise RecipeError(f"{path}: expected a recipe, found a sweep of several: eqlen sweep {path}")
    # The file's own keys are needed below, to tell what the command line changed.
    changed = copy.deepcopy(raw)
    for override in overrides:
        _apply(changed, override)
    if holes := [key for key, value in leaves(changed).items() if value == HOLE]:
        remedy = f"{HOLE} is to be filled in, or its line deleted where it is no key of ours"
        raise RecipeError(f"{path}: {', '.join(holes)}: {remedy}")
    keys = tuple(override.partition("=")[0] for override in overrides)
    return parse(changed, str(path), checks, lambda recipe: _variant(raw, recipe, keys, bool(checks)))


def load_run(folder: Path) -> Recipe:
    """Return the recipe of a run's folder, or of its submission if it has not begun. Raises ValueError."""
    if (file := folder / RECIPE).is_file():
        return load(file)
    submissions = [event for event in events.read(folder) if event["kind"] == "submitted"]
    if not submissions or "recipe" not in submissions[-1]:
        raise ValueError(f"{folder}: expected a run folder with a {RECIPE}, found none")
    return parse(submissions[-1]["recipe"], str(folder / events.FILE))


def _variant(raw: dict[str, Any], recipe: Recipe, keys: tuple[str, ...], runs: bool) -> dict[str, str]:
    """Return the values of ``keys`` that differ from the recipe file without overrides (``raw``)."""
    try:
        alone: Any = _validated(raw, runs).model_dump(mode="json")
    except ValueError:  # the file alone is not a complete recipe
        # Then every key of the command line counts as changed.
        alone = None
    changed = differences(alone, recipe.model_dump(mode="json"))
    # The run folder's name has these already, or they may differ between starts of one run.
    named = (*MAY_CHANGE, *NAMED_ELSEWHERE, *(ABLATIONS if recipe.sampling == "equal_length" else ()))
    return {
        key: shown(new)
        for key, (_, new) in changed.items()
        if is_under(key, keys) and not is_under(key, named)
    }


def parse(
    raw: dict[str, Any], where: str, checks: Sequence[RecipeCheck] = (),
    variant: Callable[[Recipe], dict[str, str]] = lambda recipe: {},
) -> Recipe:  # fmt: skip
    """Make a recipe from plain data and check it; ``where`` names it in errors. Raises RecipeError."""
    try:
        recipe = _validated(raw, bool(checks))
        if changed := variant(recipe):
            recipe = recipe.model_copy(update={"variant": recipe.variant | changed})
        # An earlier run's recipe is read without its own code, which may have stayed elsewhere.
        for each in (check, check_imports, *checks) if checks else (check,):
            each(recipe)
    except ValueError as error:
        raise RecipeError(f"{where}: {explain(error)}") from None
    return recipe


def _validated(raw: dict[str, Any], runs: bool) -> Recipe:
    """Return the recipe unchecked; where it ``runs``, its environment's options have their declared types."""
    recipe = Recipe.model_validate(raw)
    name = recipe.environment.name
    # An earlier run's recipe that is only read keeps its options as they stand.
    if not (runs and name and recipe.environment.options):
        return recipe
    section, options = recipe.environment, raw["environment"]["options"]
    options = section.options | typed_options(name, options, "json")
    return recipe.model_copy(update={"environment": section.model_copy(update={"options": options})})


def typed_options(name: str, options: Mapping[str, Any], mode: Literal["json", "python"]) -> dict[str, Any]:
    """Return options that the environment's class, or an agent's function, declares, as ``typed``."""
    key = "environment.options"
    found = typed(options, key, load_object(ENVIRONMENTS.get(name, name), "environment.name"), mode)
    if name == "agent" and "function" in found:
        found = typed(options, key, load_object(found["function"], f"{key}: function"), mode) | found
    return found


def dump(recipe: Recipe) -> str:
    """Return the resolved recipe as YAML that ``load`` reads back to the same recipe."""
    return to_yaml(recipe.model_dump(mode="json"))


def read_yaml(path: Path, seen: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Return the keys of a YAML file, over those of the file that it ``extends``. Raises RecipeError."""
    real = Path(os.path.realpath(path))  # other than Path.resolve, it ends in a loop of links
    if real in seen:
        raise RecipeError(f"{path}: extends itself through {' -> '.join(map(str, seen))}")
    if not path.is_file():
        extends = f" ({seen[-1]} extends it)" if seen else ""
        raise RecipeError(f"{path}: no such recipe file{extends}")
    try:
        with naming(path):
            raw = read_value(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise RecipeError(f"{path}: not a text in UTF-8: {error}") from None
    except yaml.YAMLError as error:
        raise RecipeError(f"{path}: not valid YAML: {in_one_line(error)}") from None
    if not isinstance(raw, dict):
        content = "nothing" if raw is None else f"{type(raw).__name__} {raw!r}"[:80]
        raise RecipeError(f"{path}: expected keys and values, found {content}")
    base = raw.pop("extends", None)
    if base is None:
        return raw
    if not isinstance(base, str):
        raise RecipeError(f"{path}: extends: expected a recipe file, found {base!r}")
    return _merge(read_yaml(path.parent / os.path.expanduser(base), (*seen, real)), raw)


def _carried(raw: dict[str, Any]) -> dict[str, Any]:
    """Return an earlier version's recipe with its keys where they are now. Lost ones stay, to be refused."""
    found = copy.deepcopy(raw)
    for key, went in read_table()["went"].items():
        section, _, name = key.rpartition(".")
        # The new place is a key, or a sentence that says what to do.
        new = re.fullmatch(r"(\w+)\.(\w+)\.(\w+)", went["to"])
        for at in _sections(found, section):
            if name not in at or (value := at.pop(name)) == went["was"]:
                continue
            if new is None:
                at[name] = value
            else:
                found.setdefault(new[1], {}).setdefault(new[2], {})[new[3]] = value
    return found


def _sections(raw: dict[str, Any], section: str) -> list[dict[str, Any]]:
    """Return the mappings at ``section``: one, or those of a list."""
    found: list[Any] = [raw]
    for name in section.split("."):
        below = [at.get(name) for at in found if isinstance(at, dict)]
        found = [each for value in below for each in (value if isinstance(value, list) else [value])]
    return [at for at in found if isinstance(at, dict)]


def _merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """Return ``base`` with the values of ``over``; mappings merge key by key, and an empty one empties."""
    merged = dict(base)
    for key, value in over.items():
        if value and isinstance(value, dict) and isinstance(old := merged.get(key), dict):
            value = _merge(old, value)
        merged[key] = value
    return merged


def _apply(raw: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise RecipeError(f"override {override!r}: expected key.sub=value")
    at: Any = raw
    *parents, last = key.split(".")
    # Missing sections are made; unknown ones are refused by the schema.
    for part in parents:
        if isinstance(at, list):
            at = at[_index(at, part, override)]
        elif not isinstance(at := at.setdefault(part, {}), dict | list):
            raise RecipeError(f"override {override!r}: {part} is a value ({at!r}), not a section")
    try:
        value = read_value(text)
    except yaml.YAMLError as error:
        raise RecipeError(f"override {override!r}: not a YAML value: {in_one_line(error)}") from None
    # A number replaces an item and cannot add one.
    if isinstance(at, list):
        at[_index(at, last, override)] = value
    else:
        at[last] = value


def _index(at: list, part: str, override: str) -> int:
    if not part.isdecimal() or int(part) >= len(at):
        numbers = f"0..{len(at) - 1}"
        raise RecipeError(f"override {override!r}: {part!r} is not one of the list's numbers {numbers}")
    return int(part)


def explain(error: ValueError, schema: type[Section] = Recipe) -> str:
    """Return the errors of all keys as text, with the nearest key of ``schema`` for an unknown one."""
    if not isinstance(error, ValidationError):
        return str(error)
    alternatives: dict[tuple[str, str], list[str]] = {}  # of a key and its value: what each type expects
    # A key of several types has an error for each: they become one, ``A or B``.
    for item in error.errors(include_url=False):
        if len(alternatives) > MOST_ERRORS:
            break
        key, expected, actual = _parts(item, schema)
        alternatives.setdefault((key, actual), []).append(expected)
    texts = [key + " or ".join(expected) + actual for (key, actual), expected in alternatives.items()]
    more = [f"and more: {error.error_count()} errors in all"] if len(texts) > MOST_ERRORS else []
    return "; ".join([*texts[:MOST_ERRORS], *more])


def _parts(item: ErrorDetails, schema: type[Section]) -> tuple[str, str, str]:
    """Split the text of an error into the key, what was expected, and what was found."""
    if item["type"] == "extra_forbidden":
        parts, value = [*item["loc"]], item["input"]
        while isinstance(value, dict) and value:  # a section of another trainer's: its first key
            parts, value = [*parts, next(iter(value))], next(iter(value.values()))
        hint, name, last = nearest(parts, schema), ".".join(map(str, parts)), str(parts[-1])
        if hint == f"nearest: {name!r}" and re.fullmatch(r"\D+\.\D+", last):
            hint = f"in a file {last.replace('.', ': {')}: ...{'}' * last.count('.')}"
        return f"unknown key {name!r}", f" ({hint})" if hint else "", ""
    key = ".".join(str(part) for part in item["loc"] if "[" not in str(part))  # [..] is a type of a union
    if item["type"] == "missing":
        return f"missing key {key!r}", "", ""
    own = item.get("ctx", {}).get("error") if item["type"] == "value_error" else None  # from our validators
    expected = str(own or item["msg"])
    if item["type"] == "model_type":
        expected = "expected a section, as in key.sub=value"
    return f"{key}: ", expected, "" if own and ", found " in expected else f", found {item['input']!r:.200}"
