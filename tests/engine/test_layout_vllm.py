"""The rules for engines against vLLM itself: its configuration and its model, as one of N ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import assume, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from megatron_eqlen import layout
from megatron_eqlen.hf.config import parse_config
from megatron_eqlen.recipe import RolloutRecipe
from megatron_eqlen.rollout.vllm.containment import contained, importing_vllm
from tests.pure.test_layout import configs

ARCHITECTURES = {
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
}


@pytest.fixture
def group():
    """vLLM's groups of a world of one process."""
    with importing_vllm():
        from vllm.distributed import parallel_state

    with contained():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        parallel_state.init_distributed_environment(1, 0, "env://", 0, "gloo")
        yield parallel_state
        parallel_state.destroy_distributed_environment()


def vllm_builds(folder: Path, ranks: int, parallel_state) -> bool:
    """Whether vLLM makes its configuration and model for one of ``ranks`` tensor-parallel ranks."""
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
                initialize_model(config)
    except (ValueError, AssertionError):
        return False
    finally:
        parallel_state.destroy_model_parallel()
    return True


def test_an_engine_is_approved_if_and_only_if_vllm_builds_it(group, tmp_path_factory):
    folder = tmp_path_factory.mktemp("vllm")

    @hypothesis_settings(max_examples=40, deadline=None, database=None)
    @given(raw=configs(), ranks=st.sampled_from([1, 2, 2, 3, 4, 6, 8]))
    def check(raw, ranks):
        model = parse_config(raw, "tiny")
        # vLLM finds at its first token only that key heads cannot be divided, and asks of no unused size
        assume(not model.delta_net or model.delta_net.num_key_heads % ranks == 0)
        assume(not model.delta_net or not all(model.delta_net.layers))
        raw = raw | {"architectures": [ARCHITECTURES[raw["model_type"]]]}
        (folder / "config.json").write_text(json.dumps(raw))
        problems = list(layout.engine(RolloutRecipe(tensor_parallel=ranks), model))
        assert vllm_builds(folder, ranks, group) == (not problems), problems

    check()
