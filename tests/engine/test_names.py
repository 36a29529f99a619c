"""Names that type checks cannot see: attributes of vLLM's objects, methods that the package replaces, engine
arguments. They are looked up in vLLM's sources; ``tools/gpuless`` does so in the wheels for GPUs, too."""

from __future__ import annotations

from megatron_eqlen.engines import vllm_args
from megatron_eqlen.recipe import RolloutRecipe
from tests.gpuless.names import missing_in_vllm
from tests.kit import sources
from tests.kit.sources import definition
from tests.kit.tiny_models import save_tiny


def test_what_is_replaced_and_read_inside_vllm_is_there():
    assert missing_in_vllm() == []


def test_engine_arguments_are_those_of_vllm(monkeypatch, tmp_path):
    monkeypatch.setattr(vllm_args, "VLLM_SAMPLES", True)
    save_tiny(tmp_path, "qwen3_moe")
    drafts = {"method": "ngram", "num_speculative_tokens": 2}
    rollout = RolloutRecipe(keep_routes=True, keep_sampling_mask=True, vllm={"speculative_config": drafts})
    found = definition("vllm.engine.arg_utils", "EngineArgs")
    assert found is not None
    assert vllm_args.engine_args(str(tmp_path), rollout, "float32", 256).keys() <= sources.fields(found)
