"""Weight map of the Qwen3-Next models: Gated DeltaNet, gated attention, experts and a shared expert.

The checkpoint's multi-token prediction layer (``mtp.*``) is not trained; conversion carries it through.
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron_eqlen.hf.config import DeltaNet, Experts, ModelConfig
from megatron_eqlen.hf.qwen3 import attention, dense_mlp, embedding, gated_mlp, head, norms
from megatron_eqlen.hf.qwen3_moe import experts
from megatron_eqlen.hf.weight_map import DeltaNetInput, Weight


def weights(model: ModelConfig) -> Iterator[Weight]:
    net, moe, hidden = model.delta_net, model.experts, model.hidden_size
    assert net is not None
    assert moe is not None
    yield embedding(model)
    for layer in range(model.num_hidden_layers):
        yield from norms(model, layer)
        yield from delta_net(hidden, net, layer) if net.layers[layer] else attention(model, layer)
        if moe.layers[layer]:
            yield from experts(hidden, moe, layer)
            yield from shared_expert(hidden, moe, layer)
        else:
            yield from dense_mlp(model, layer)
    yield from head(model)


def delta_net(hidden: int, net: DeltaNet, layer: int) -> Iterator[Weight]:
    megatron, hf = f"decoder.layers.{layer}.self_attention.", f"model.layers.{layer}.linear_attn."
    keys, values = net.num_key_heads * net.key_head_dim, net.num_value_heads * net.value_head_dim
    per_value_head = ((net.num_value_heads,),)
    yield Weight(
        megatron + "in_proj.weight",
        (hf + "in_proj_qkvz.weight", hf + "in_proj_ba.weight"),
        ((2 * keys + 2 * values, hidden), (2 * net.num_value_heads, hidden)),
        dim=0,
        arrangement=DeltaNetInput(
            net.key_head_dim, net.value_head_dim, net.num_value_heads // net.num_key_heads
        ),
    )
    yield Weight(
        megatron + "conv1d.weight",
        (hf + "conv1d.weight",),
        ((2 * keys + values, 1, net.conv_kernel_dim),),
        dim=0,
        sections=(keys, keys, values),
    )
    yield Weight(megatron + "dt_bias", (hf + "dt_bias",), per_value_head, dim=0)
    yield Weight(megatron + "A_log", (hf + "A_log",), per_value_head, dim=0)
    yield Weight(megatron + "out_norm.weight", (hf + "norm.weight",), ((net.value_head_dim,),))
    yield Weight(megatron + "out_proj.weight", (hf + "out_proj.weight",), ((hidden, values),), dim=1)


def shared_expert(hidden: int, moe: Experts, layer: int) -> Iterator[Weight]:
    megatron, hf = f"decoder.layers.{layer}.mlp.", f"model.layers.{layer}.mlp."
    width = moe.shared_expert_intermediate_size
    yield from gated_mlp(megatron + "shared_experts.", hf + "shared_expert.", hidden, width)
    gate = hf + "shared_expert_gate.weight"
    yield Weight(megatron + "shared_experts.gate_weight", (gate,), ((1, hidden),))
