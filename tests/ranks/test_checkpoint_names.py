"""Checkpoints have one set of names and shapes, with Transformer Engine's modules and without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_eqlen.hf.config import read_config
from megatron_eqlen.models import config
from megatron_eqlen.models.build import build_model
from megatron_eqlen.models.groups import start
from megatron_eqlen.models.names import local_parameters
from megatron_eqlen.models.torch_dist import load_sharded, sharding_options
from megatron_eqlen.models.weights import load_hf
from megatron_eqlen.recipe import ParallelRecipe
from tests.kit.distributed import run_ranks
from tests.kit.marks import weekly_but
from tests.kit.tiny_models import save_tiny

LAYOUTS: dict[str, dict[str, Any]] = {
    "qwen2": {"tensor": 2},
    "qwen3_5_text": {"tensor": 2, "sequence": True},
    "qwen3_moe": {"tensor": 2, "expert": 2},
    "qwen3_next": {"tensor": 2, "expert": 2},
}


def build(folder: Path, layout: dict[str, Any], engine: bool) -> list:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(config, "uses_transformer_engine", lambda: engine)
        return build_model(read_config(folder), ParallelRecipe(**layout), torch.float32)


def sharded(chunks: list) -> dict[str, Any]:
    return chunks[0].sharded_state_dict(metadata=sharding_options())


def tensors(chunks: list) -> set[tuple]:
    """Return (key, whole shape, this part's shape and offset, replica) of every tensor that is saved."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories

    state = sharded(chunks)
    apply_factories(state)
    parts = [item for item in nested_values(state) if isinstance(item, ShardedTensor)]
    return {
        (part.key, part.global_shape, part.global_offset, part.local_shape, part.replica_id) for part in parts
    }


def both(folder: Path, layout: dict[str, Any], checkpoint: Path) -> None:
    """Assert on each rank that both models have the same tensors, and that each loads what the other
    saved."""
    from megatron.core import dist_checkpointing

    from tests.kit.transformer_engine_names import stand_in

    start(ParallelRecipe(**layout), seed=1)
    plain = build(folder, layout, engine=False)
    stand_in()
    fused = build(folder, layout, engine=True)
    assert any(name.endswith("layer_norm_weight") for name, _ in fused[0].named_parameters())
    assert tensors(fused) == tensors(plain)
    load_hf(plain, folder)
    expected = {name: value.detach().clone() for name, value in local_parameters(plain).items()}
    for source, target, path in ((plain, fused, checkpoint / "a"), (fused, plain, checkpoint / "b")):
        if dist.get_rank() == 0:
            path.mkdir(parents=True)
        dist.barrier()
        dist_checkpointing.save(sharded(source), str(path))
        for parameter in target[0].parameters():
            parameter.data.zero_()
        target[0].load_state_dict(load_sharded(sharded(target), path), strict=True)
        found = local_parameters(target)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.parametrize("family", weekly_but({"qwen3_5_text", "qwen3_moe"}, LAYOUTS))
def test_transformer_engines_modules_and_plain_ones_share_checkpoints(tmp_path, family):
    save_tiny(tmp_path / "hf", family)
    run_ranks(2, both, tmp_path / "hf", LAYOUTS[family], tmp_path / "checkpoints")
