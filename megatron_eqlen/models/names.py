"""Names of a rank's parameters: Megatron's, with the layer and expert numbers of the whole model, as weight
maps (``hf/families.py``) and checkpoints have them, and torch modules' names for Transformer Engine's."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
from megatron.core import parallel_state

from megatron_eqlen.hf.config import ModelConfig
from megatron_eqlen.models.layer_specs import FUSED_NORMS
from megatron_eqlen.models.policy_model import PolicyModel


def local_parameters(chunks: Sequence[torch.nn.Module]) -> dict[str, torch.Tensor]:
    """Return this rank's parameters, and its routers' biases, under their names in the weight maps."""
    return {
        global_name(chunk, name): tensor
        for chunk in map(unwrapped, chunks)
        for name, tensor in (*chunk.named_parameters(), *chunk.named_buffers())
        if isinstance(tensor, torch.nn.Parameter) or name.endswith("router.expert_bias")
    }


def model_config(chunks: Sequence[torch.nn.Module]) -> ModelConfig:
    return unwrapped(chunks[0]).model_config


def unwrapped(chunk: torch.nn.Module) -> PolicyModel:
    while isinstance(inner := getattr(chunk, "module", None), torch.nn.Module):
        chunk = inner
    assert isinstance(chunk, PolicyModel)
    return chunk


def global_name(chunk: PolicyModel, name: str) -> str:
    """Return a parameter's name with the layer and expert numbers of the whole model, as without TE."""
    in_layer = re.fullmatch(r"decoder\.layers\.(\d+)\.(.*)", name)
    if in_layer is None:
        return name
    layer = (chunk.decoder.layers[int(in_layer[1])].layer_number - 1) // 2  # of a mixer or an MLP
    rest = in_layer[2]
    # `mlp.linear_fc1.layer_norm_weight` is `pre_mlp_layernorm.weight`
    for fused, alone in FUSED_NORMS.items():
        if rest.startswith(fused):
            rest = alone + rest.removeprefix(fused)
    # grouped experts: `experts.linear_fc1.weight3`, and `experts.linear_fc1.adapters.3.A`, are expert 3's
    rest = re.sub(r"experts\.(linear_fc[12])\.weight(\d+)", r"experts.local_experts.\2.\1.weight", rest)
    rest = re.sub(r"experts\.(linear_fc[12])\.adapters\.(\d+)", r"experts.local_experts.\2.\1.adapter", rest)
    expert = re.fullmatch(r"mlp\.experts\.local_experts\.(\d+)\.(.*)", rest)
    if expert:
        # experts are divided over the expert-parallel ranks in order
        first = experts_per_rank(chunk.model_config) * parallel_state.get_expert_model_parallel_rank()
        rest = f"mlp.experts.local_experts.{first + int(expert[1])}.{expert[2]}"
    return f"decoder.layers.{layer}.{rest}"


def experts_per_rank(model: ModelConfig) -> int:
    if not model.experts:
        return 0
    return model.experts.num_experts // parallel_state.get_expert_model_parallel_world_size()
