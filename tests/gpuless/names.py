"""Checks of the names and signatures of vLLM, Megatron-Core, Transformer Engine, fla and Transformers that
the package uses, in their sources. ``tests.kit.sources`` says which are read."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from tests.kit import ROOT, sources
from tests.kit.sources import Definition, Function, definition

PACKAGES = ("vllm", "megatron.core", "transformer_engine", "fla", "transformers")
FILES = sorted((ROOT / "megatron_eqlen").rglob("*.py"))
OWN_CALLS = {"PolicyModel.forward"}
"""Methods that the package alone calls."""
PROTOCOL = "vllm.entrypoints.scale_out.token_in_token_out.protocol"
REPLACED = {
    ("vllm.v1.engine.output_processor", "RequestState"): ["_new_completion_output"],
    ("vllm.outputs", "RequestOutput"): ["add"],
    ("vllm.v1.sample.sampler", "Sampler"): ["forward"],
}
"""Names inside vLLM that the package assigns to (docs/engines.md)."""

TYPES = {
    ("generate_api.py", "choice"): (PROTOCOL, "GenerateTokensStreamChoice"),
    ("generate_api.py", "token"): (PROTOCOL, "GenerateLogProbsContent"),
    ("colocated.py", "output"): ("vllm.v1.engine", "EngineCoreOutput"),
    ("colocated.py", "chosen"): ("vllm.v1.outputs", "LogprobsLists"),
    ("cpu/sampler.py", "output"): ("vllm.v1.outputs", "SamplerOutput"),
    ("cpu/sampler.py", "self.runner.input_batch"): ("vllm.v1.worker.gpu_input_batch", "InputBatch"),
    ("cpu/runner.py", "batch"): ("vllm.v1.worker.gpu_input_batch", "InputBatch"),
    ("cpu/runner.py", "self.model_runner"): ("vllm.v1.worker.gpu_model_runner", "GPUModelRunner"),
    ("lifecycle.py", "core"): ("vllm.v1.engine.core", "EngineCore"),
    ("colocated.py", "self.core"): ("vllm.v1.engine.core", "EngineCore"),
}
"""Types of variables in files of ``engines`` that hold objects of vLLM."""


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


def missing_names() -> list[str]:
    """Return the imported names that are not defined."""
    used = [each for file in FILES for each in imported(file).values()]
    assert len(used) > 100
    return [f"{each.file}: {each.module}.{each.name} is not there" for each in used if each.found is None]


def missing_attributes() -> list[str]:
    """Return the attributes of imported modules that are not defined."""
    missing = []
    for file in FILES:
        names = imported(file)
        for node in ast.walk(sources.tree(file)):
            match node:
                # the second as an assignment that a type checker does not refuse
                case ast.Attribute(ast.Name(owner), name) | ast.Subscript(
                    ast.Attribute(ast.Name(owner), "__dict__"), ast.Constant(name)
                ) if owner in names and name != "__dict__":
                    found = names[owner].found
                    if found and isinstance(found.node, ast.Module) and not definition(found.module, name):
                        missing.append(f"{_place(file)}:{node.lineno}: {found.module}.{name} is not there")
    return missing


def refused_arguments() -> list[str]:
    """Return the calls that pass arguments which are not taken."""
    return [
        f"{_place(file)}:{call.lineno}: {ast.unparse(call.func)} takes no {unknown}"
        for file in FILES
        for call, found in calls(file)
        if (unknown := refused(call, found))
    ]


def lost_arguments() -> list[str]:
    """Return the overriding methods that do not take what they are passed."""
    pairs = [pair for file in FILES for pair in overridden(file)]
    assert len(pairs) > 8
    return [
        f"{where} is not passed or does not take {lost}"
        for where, ours, theirs in pairs
        if (lost := not_taken(ours, theirs))
    ]


def missing_in_vllm() -> list[str]:
    """Return the methods of vLLM that are replaced, and the attributes of its objects that are read, but are
    not there."""
    missing = []
    for (module, name), methods in REPLACED.items():
        found = definition(module, name)
        own = [method for method in methods if found is None or sources.method(found, method) is None]
        missing += [f"{module}.{name}.{method} is not there to be replaced" for method in own]
    for (file, variable), (module, name) in TYPES.items():
        found = definition(module, name)
        read = set()
        for node in ast.walk(sources.tree(ROOT / "megatron_eqlen/engines" / file)):
            if isinstance(node, ast.Attribute | ast.Subscript) and ast.unparse(node.value) == variable:
                read.add(node.attr if isinstance(node, ast.Attribute) else ast.literal_eval(node.slice))
        assert len(read) > 1
        lost = read - (sources.attributes(found) if found else set())
        missing += [f"engines/{file}: {module}.{name} has no {each}" for each in sorted(lost)]
    return missing


def missing_in_megatron() -> list[str]:
    """Return what ``megatron_cpu/gaps.py`` replaces in Megatron-Core's modules, but is not there."""
    from megatron_eqlen.megatron_cpu import gaps

    functions = {
        node.name: node
        for node in sources.tree(ROOT / "megatron_eqlen/megatron_cpu/gaps.py").body
        if isinstance(node, ast.FunctionDef)
    }
    missing, seen = [], 0
    for module, fix in [*gaps.EVERYWHERE.items(), *gaps.ON_CPU.items()]:
        function = functions[fix.__name__]
        owners: dict[str, Definition | None] = {}
        for node in ast.walk(function):
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                owners |= _class_of(module, function, node.targets[0].id, node.value)
        for node in ast.walk(function):
            if not isinstance(node, ast.Attribute):
                continue
            seen += 1
            owner = ast.unparse(node.value)
            if owner == function.args.args[0].arg and definition(module, node.attr) is None:
                missing.append(f"gaps.py: {module}.{node.attr} is not there")
            found = owners.get(owner) or _class_of(module, function, owner, node.value).get(owner)
            if found is not None and sources.method(found, node.attr) is None:
                missing.append(f"gaps.py: {module}: {owner} has no {node.attr}")
    assert seen > 10
    return missing


def refused_by_transformer_engine() -> list[str]:
    """Return the arguments that Megatron's layers pass and Transformer Engine does not take."""
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
            if found is None:
                wrong.append(f"{layer.name}: {base} is not there")
                continue
            for call in (call for call in made if ast.unparse(call.func) == "super().__init__"):
                checked += 1
                wrong += [f"{layer.name}: {base} takes no {name}" for name in refused(call, found)]
    assert checked > 5
    return wrong


CHECKS: tuple[Callable[[], list[str]], ...] = (
    missing_names,
    missing_attributes,
    refused_arguments,
    lost_arguments,
    missing_in_vllm,
    missing_in_megatron,
    refused_by_transformer_engine,
)


def used() -> dict[str, str]:
    """Return the signature of each imported function and class, and the text of each method that the package
    overrides or replaces, by name: what a new version may change without breaking a name."""
    texts = {}
    for each in (each for file in FILES for each in imported(file).values()):
        if each.found is not None and (signature := _signature(each.found)):
            texts[f"{each.module}.{each.name}: arguments"] = signature
    for file in FILES:
        texts |= {f"{where} overrides": ast.unparse(theirs) for where, _, theirs in overridden(file)}
    for (module, name), methods in REPLACED.items():
        found = definition(module, name)
        for method in methods if found else ():
            theirs = sources.method(found, method)
            texts[f"{module}.{name}.{method}: replaced"] = ast.unparse(theirs) if theirs else ""
    return texts


def _signature(found: Definition) -> str:
    if isinstance(found.node, Function):
        return ast.unparse(found.node.args)
    if not isinstance(found.node, ast.ClassDef):
        return ""
    made = sources.method(found, "__init__")
    return ast.unparse(made.args) if made else ", ".join(sorted(sources.fields(found)))


def _class_of(
    module: str, function: ast.FunctionDef, name: str, value: ast.expr
) -> dict[str, Definition | None]:
    """Return ``name``'s class if ``value`` is an attribute of the module that ``function`` is given."""
    if isinstance(value, ast.Attribute) and ast.unparse(value.value) == function.args.args[0].arg:
        found = definition(module, value.attr)
        if found is not None and isinstance(found.node, ast.ClassDef):
            return {name: found}
    return {}


def _place(file: Path) -> Path:
    return file.relative_to(ROOT)


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
