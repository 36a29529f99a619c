"""The rules for engines against vLLM itself: its configuration and its model, as one of N ranks."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import assume, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from megatron_eqlen.engines.containment import contained, importing_vllm
from megatron_eqlen.hf.config import parse_config
from megatron_eqlen.job import Job, load
from megatron_eqlen.plan import engine
from megatron_eqlen.plan.memory import memory
from megatron_eqlen.recipe import RolloutRecipe, layout
from tests.kit import ROOT
from tests.pure.test_layout import configs

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
}
if find_spec("torchvision"):
    ARCHITECTURES |= {"qwen3_5_text": "Qwen3_5ForCausalLM", "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM"}


@pytest.fixture
def group():
    """Start vLLM's groups of a world of one process."""
    with importing_vllm():
        from vllm.distributed import parallel_state

    with contained():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        parallel_state.init_distributed_environment(1, 0, "env://", 0, "gloo")
        yield parallel_state
        parallel_state.destroy_distributed_environment()


def vllm_parameters(folder: Path, ranks: int, parallel_state) -> int | None:
    """Return the number of parameters of the model that vLLM makes for one of ``ranks`` tensor-parallel
    ranks; None if it makes none."""
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model

    arguments = EngineArgs(
        str(folder), skip_tokenizer_init=True, dtype="bfloat16", max_model_len=64, tensor_parallel_size=ranks,
        enforce_eager=True,
    )  # fmt: skip
    try:
        config = arguments.create_engine_config()
        with set_current_vllm_config(config):
            parallel_state.initialize_model_parallel(1, backend="gloo")
            parallel_state._TP.world_size = ranks
            with torch.device("meta"):
                built = initialize_model(config)
    except (ValueError, AssertionError):
        return None
    finally:
        parallel_state.destroy_model_parallel()
    return sum(parameter.numel() for parameter in built.parameters())


def test_an_engine_is_approved_if_and_only_if_vllm_builds_it_with_as_many_parameters(group, tmp_path_factory):
    folder = tmp_path_factory.mktemp("vllm")

    @hypothesis_settings(max_examples=40, deadline=None, database=None)
    @given(raw=configs(), ranks=st.sampled_from([1, 2, 2, 3, 4, 6, 8]))
    def check(raw, ranks):
        assume(raw["model_type"] in ARCHITECTURES)
        model = parse_config(raw, "tiny")
        # vLLM finds at its first token only that key heads cannot be divided, and asks of no unused size
        assume(not model.delta_net or model.delta_net.num_key_heads % ranks == 0)
        assume(not model.delta_net or not all(model.delta_net.layers))
        raw = raw | {"architectures": [ARCHITECTURES[raw["model_type"]]]}
        (folder / "config.json").write_text(json.dumps(raw))
        problems = list(layout.engine(RolloutRecipe(tensor_parallel=ranks), model))
        found = vllm_parameters(folder, ranks, group)
        assert (found is not None) == (not problems), problems
        assert found is None or found == engine.parameters(model, ranks)

    check()


def test_vllm_asks_for_the_same_share_of_the_gpu():
    """Run the pinned vLLM's own check, on a GPU of which the trainer holds what the plan says."""
    from vllm.v1.worker.utils import request_memory

    recipe = load(ROOT / "recipes/qwen3_32b.yaml")
    need = memory(Job(recipe))
    held = sum(need.parts[part] for part in need.table["start"] if part not in ("engine", "kv_cache"))

    def asks(utilization: float, free: float) -> bool:
        gpu: Any = SimpleNamespace(total_memory=int(need.total), free_memory=int(free), device_="cuda:0")
        config: Any = SimpleNamespace(gpu_memory_utilization=utilization)
        try:
            return request_memory(gpu, config) > 0
        except ValueError:
            return False

    for percent in range(50, 100):
        utilization = percent / 100
        changed = load(ROOT / "recipes/qwen3_32b.yaml", [f"rollout.gpu_memory_utilization={utilization}"])
        problems = memory(Job(changed)).problems()
        refused = any("vLLM wants" in problem for problem in problems)
        assert asks(utilization, need.total - held) == (not refused), utilization


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_in_fp8_a_part_of_an_expert_is_as_wide_as_vllm_pads_it(ranks):
    """Qwen3-235B-A22B: 94 layers of 128 experts, hidden size 4096, width 1536."""
    with importing_vllm():
        from vllm.model_executor.layers.fused_moe.config import FusedMoEParallelConfig
        from vllm.model_executor.layers.quantization.online.fp8 import Fp8PerBlockOnlineMoEMethod

    method = object.__new__(Fp8PerBlockOnlineMoEMethod)
    method.weight_block_size = [128, 128]
    alone = FusedMoEParallelConfig.make_no_parallel()
    _, width = method.maybe_roundup_sizes(4096, 1536 // ranks, torch.bfloat16, alone)
    assert (width > 1536 // ranks) == (ranks == 8)
    plain, fp8 = (
        Job(load(ROOT / "recipes/qwen3_235b_a22b.yaml", [f"rollout.tensor_parallel={ranks}", *more]))
        for more in (["rollout.quantization=null"], [])
    )
    attention = 94 * 4096 * (2 * 64 + 2 * max(4, ranks)) * 128 / ranks
    experts = 94 * 128 * 3 * 4096
    saved = 2 * (attention + experts * 1536 // ranks) - (attention + experts * width) * (1 + 4 / 128**2)
    assert engine.weights(plain) - engine.weights(fp8) == pytest.approx(saved, rel=1e-6)
