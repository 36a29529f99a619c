"""Names and signatures of vLLM, Megatron-Core, Transformer Engine and fla that the package uses, looked up in
the wheels for GPUs without importing them."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest

from tests.gpuless.names import CHECKS
from tests.kit import ROOT, sources
from tests.kit import transformer_engine_names as te
from tests.kit.sources import definition


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_packages_have_what_is_used_of_them(check):
    assert check() == []


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
