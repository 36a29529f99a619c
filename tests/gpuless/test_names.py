"""Names and signatures of vLLM, Megatron-Core, Transformer Engine and fla that the package uses, looked up in
the wheels for GPUs without importing them."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.kit import ROOT, sources
from tests.kit import transformer_engine_names as te
from tests.kit.sources import Definition, Function, definition

PACKAGES = ("vllm", "megatron.core", "transformer_engine", "fla")
FILES = sorted((ROOT / "megatron_eqlen").rglob("*.py"))
OWN_CALLS = {"PolicyModel.forward"}
"""Methods that the package alone calls."""


class Used(NamedTuple):
    """A name that a file imports from one of the packages."""

    file: Path
    module: str
    name: str

    @property
    def found(self) -> Definition | None:
        return definition(self.module, self.name)


def imported(file: Path) -> dict[str, Used]:
    """Return the names of the packages, by the name that the file has for each."""
    return {
        alias.asname or alias.name: Used(file.relative_to(ROOT), node.module, alias.name)
        for node in ast.walk(sources.tree(file))
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith(PACKAGES)
        for alias in node.names
    }


def test_every_imported_name_is_defined():
    used = [each for file in FILES for each in imported(file).values()]
    assert len(used) > 100
    assert [each for each in used if each.found is None] == []


def test_every_attribute_of_an_imported_module_is_defined():
    missing = []
    for file in FILES:
        names = imported(file)
        for node in ast.walk(sources.tree(file)):
            if (
                isinstance(node, ast.Attribute)
                and isinstance(node.value, ast.Name)
                and node.value.id in names
            ):
                found = names[node.value.id].found
                if found and isinstance(found.node, ast.Module) and not definition(found.module, node.attr):
                    missing.append((str(file), node.lineno, found.module, node.attr))
    assert missing == []


def test_calls_pass_arguments_that_the_packages_take():
    wrong = [
        f"{file.relative_to(ROOT)}:{call.lineno}: {ast.unparse(call.func)} takes no {unknown}"
        for file in FILES
        for call, found in calls(file)
        if (unknown := refused(call, found))
    ]
    assert wrong == []


def test_fla_takes_the_arguments_of_the_recurrence_and_of_the_convolution():
    """The kernel is called by another name, as an argument."""
    file = ROOT / "megatron_eqlen/models/gated_delta_net.py"
    (call, *_), recurrence = (
        _called("kernel", "g", file),
        definition("fla.ops.gated_delta_rule", "chunk_gated_delta_rule"),
    )
    assert recurrence is not None
    assert isinstance(recurrence.node, ast.FunctionDef)
    names = sources.parameters(recurrence.node)
    assert names[:3] == ["q", "k", "v"]
    assert {keyword.arg for keyword in call.keywords} <= {*names, *accepted_in_kwargs(recurrence.node)}
    convolution = definition("fla.modules.causal_conv1d", "causal_conv1d")
    assert convolution is not None
    assert isinstance(convolution.node, ast.FunctionDef)
    assert sources.parameters(convolution.node)[:2] == ["x", "weight"]


def test_methods_that_subclasses_override_take_what_the_packages_pass():
    pairs = [pair for file in FILES for pair in overridden(file)]
    assert len(pairs) > 8
    assert [(where, lost) for where, ours, theirs in pairs if (lost := not_taken(ours, theirs))] == []


def test_transformer_engine_takes_what_megatrons_layers_pass():
    """Megatron-Core names an older Transformer Engine as the newest that it was tested with."""
    module = "megatron.core.extensions.transformer_engine"
    file = sources.source(module)
    assert file is not None
    checked, wrong = 0, []
    for layer in (node for node in ast.walk(sources.tree(file)) if isinstance(node, ast.ClassDef)):
        made = [node for node in ast.walk(layer) if isinstance(node, ast.Call)]
        for base in (ast.unparse(base) for base in layer.bases):
            if not base.startswith("te.pytorch."):
                continue
            place, _, name = base.replace("te", "transformer_engine", 1).rpartition(".")
            found = definition(place, name)
            assert found is not None, base
            for call in (call for call in made if ast.unparse(call.func) == "super().__init__"):
                checked += 1
                wrong += [f"{layer.name}: {base} takes no {name}" for name in refused(call, found)]
    assert checked > 5
    assert wrong == []


@pytest.mark.parametrize("layer", [te.Linear, te.GroupedLinear], ids=lambda layer: layer.__name__)
def test_the_stand_in_for_transformer_engine_takes_its_arguments_in_its_order(layer):
    """Adapters read what Megatron passes; Transformer Engine's further arguments have defaults."""
    theirs = definition(f"transformer_engine.pytorch.{te.STAND_INS[layer]}", layer.__name__)
    assert theirs is not None
    forward = sources.method(theirs, "forward")
    assert forward is not None
    ours = list(inspect.signature(layer.forward).parameters)
    assert sources.parameters(forward)[: len(ours)] == ours
    assert len(forward.args.defaults) >= len(sources.parameters(forward)) - len(ours)


@pytest.mark.parametrize("name", [te.FusedAdam, te.get_cpu_offload_context], ids=lambda name: name.__name__)
def test_stand_ins_that_construct_take_what_transformer_engine_takes(name):
    """Arguments without a place in their call may come in another order."""
    theirs = definition(f"transformer_engine.pytorch.{te.STAND_INS[name]}", name.__name__)
    assert theirs is not None
    made = sources.method(theirs, "__init__") if isinstance(theirs.node, ast.ClassDef) else theirs.node
    assert isinstance(made, ast.FunctionDef)
    ours = [each for each in inspect.signature(name).parameters.values() if each.name != "self"]
    assert {each.name for each in ours} <= {*sources.parameters(made)}
    placed = [argument.arg for argument in made.args.args if argument.arg != "self"]
    mine = [each.name for each in ours if each.kind is each.POSITIONAL_OR_KEYWORD]
    assert mine == placed[: len(mine)]


def overridden(file: Path) -> Iterator[tuple[str, Function, Function]]:
    """Yield the methods of subclasses that override a method of a package's class: (place, ours, theirs)."""
    names = imported(file)
    for ours in ast.walk(sources.tree(file)):
        if not isinstance(ours, ast.ClassDef):
            continue
        parents = [names[ast.unparse(base)].found for base in ours.bases if ast.unparse(base) in names]
        for parent in parents:
            assert parent is not None
            for own in ours.body:
                name = f"{ours.name}.{getattr(own, 'name', '')}"
                if isinstance(own, Function) and own.name != "__init__" and name not in OWN_CALLS:
                    theirs = sources.method(parent, own.name)
                    if theirs is not None:
                        yield f"{file.relative_to(ROOT)}: {name}", own, theirs


def calls(file: Path) -> Iterator[tuple[ast.Call, Definition]]:
    """Yield the calls of imported functions and classes."""
    names = imported(file)
    for node in ast.walk(sources.tree(file)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names:
            found = names[node.func.id].found
            if found is not None:
                yield node, found


def refused(call: ast.Call, found: Definition) -> list[str]:
    """Return the keywords that the function or class does not take, and a count of arguments in excess."""
    keywords = {keyword.arg for keyword in call.keywords if keyword.arg}
    if isinstance(found.node, ast.ClassDef):
        if not sources.complete(found):
            return []
        made = sources.method(found, "__init__")
        if made is None:  # a data class
            return sorted(keywords - sources.fields(found))
        return _refused(call, keywords, made, 1)
    if isinstance(found.node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return _refused(call, keywords, found.node, 0)
    return []


def _refused(call: ast.Call, keywords: set[str], function: Function, bound: int) -> list[str]:
    names = sources.parameters(function)
    unknown = [] if function.args.kwarg else sorted(keywords - {*names})
    room = len(function.args.posonlyargs) + len(function.args.args) - bound
    given = sum(not isinstance(argument, ast.Starred) for argument in call.args)
    return unknown + ([f"{given}th argument"] if given > room and not function.args.vararg else [])


def not_taken(ours: Function, theirs: Function) -> list[str]:
    """Return their parameters that ours has not, and those without a default that are at another place."""
    own = sources.parameters(ours)
    placed = [argument.arg for argument in (*theirs.args.posonlyargs, *theirs.args.args)]
    required = placed[: len(placed) - len(theirs.args.defaults)]
    lost = [
        theirs_
        for theirs_, own_ in zip(required, own, strict=False)
        if not own_.startswith("*") and own_ != theirs_
    ]
    named = [each.arg for each in theirs.args.kwonlyargs]
    named += [] if ours.args.vararg else placed
    return lost + ([] if ours.args.kwarg else [name for name in named if name not in own])


def accepted_in_kwargs(function: ast.FunctionDef) -> set[str]:
    """Return the names that a function takes from its ``**kwargs``."""
    if not function.args.kwarg:
        return set()
    return {str(node.value) for node in ast.walk(function) if isinstance(node, ast.Constant)}


def _called(name: str, keyword: str, file: Path) -> list[ast.Call]:
    return [
        node
        for node in ast.walk(sources.tree(file))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == name
        if keyword in {each.arg for each in node.keywords}
    ]
