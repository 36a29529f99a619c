"""Names that type checks cannot see: attributes of vLLM's objects, methods that the package replaces, engine
arguments. They are looked up in vLLM's sources; ``tools/gpuless`` does so in the wheels for GPUs, too."""

from __future__ import annotations

import ast

import pytest

from megatron_eqlen.engines import vllm_args
from megatron_eqlen.recipe import RolloutRecipe
from tests.kit import ROOT, sources
from tests.kit.sources import definition
from tests.kit.tiny_models import save_tiny

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
    ("core_requests.py", "output"): ("vllm.v1.engine", "EngineCoreOutput"),
    ("core_requests.py", "chosen"): ("vllm.v1.outputs", "LogprobsLists"),
    ("cpu/sampler.py", "output"): ("vllm.v1.outputs", "SamplerOutput"),
    ("cpu/sampler.py", "self.runner.input_batch"): ("vllm.v1.worker.gpu_input_batch", "InputBatch"),
    ("cpu/runner.py", "batch"): ("vllm.v1.worker.gpu_input_batch", "InputBatch"),
    ("cpu/runner.py", "self.model_runner"): ("vllm.v1.worker.gpu_model_runner", "GPUModelRunner"),
    ("core_requests.py", "core"): ("vllm.v1.engine.core", "EngineCore"),
    ("lifecycle.py", "core"): ("vllm.v1.engine.core", "EngineCore"),
    ("colocated.py", "self.core"): ("vllm.v1.engine.core", "EngineCore"),
}
"""Types of variables in files of ``engines`` that hold objects of vLLM."""


@pytest.mark.parametrize(("place", "methods"), REPLACED.items(), ids=lambda value: str(value))
def test_what_is_replaced_inside_vllm_is_there(place, methods):
    found = definition(*place)
    assert found is not None
    assert [name for name in methods if sources.method(found, name) is None] == []


@pytest.mark.parametrize(("place", "kind"), TYPES.items(), ids=str)
def test_what_is_read_of_vllms_objects_is_an_attribute_of_theirs(place, kind):
    file, variable = place
    found = definition(*kind)
    assert found is not None
    read = set()
    for node in ast.walk(sources.tree(ROOT / "megatron_eqlen/engines" / file)):
        if isinstance(node, ast.Attribute | ast.Subscript) and ast.unparse(node.value) == variable:
            read.add(node.attr if isinstance(node, ast.Attribute) else ast.literal_eval(node.slice))
    assert len(read) > 1
    assert read <= sources.attributes(found)


def test_engine_arguments_are_those_of_vllm(monkeypatch, tmp_path):
    monkeypatch.setattr(vllm_args, "STOCK", True)
    save_tiny(tmp_path, "qwen3_moe")
    drafts = {"method": "ngram", "num_speculative_tokens": 2}
    rollout = RolloutRecipe(keep_routes=True, keep_sampling_mask=True, speculation=drafts)
    found = definition("vllm.engine.arg_utils", "EngineArgs")
    assert found is not None
    assert vllm_args.engine_args(str(tmp_path), rollout, "float32", 256).keys() <= sources.fields(found)
