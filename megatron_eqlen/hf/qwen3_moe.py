"""Weight map of the Qwen3-MoE models: Qwen3's attention, a router and experts."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_eqlen.hf.config import Experts, ModelConfig
from megatron_eqlen.hf.qwen3 import attention, dense_mlp, embedding, gated_mlp, head, norms
from megatron_eqlen.hf.weight_map import Weight


def weights(model: ModelConfig) -> Iterator[Weight]:
    moe = model.experts
    assert moe is not None
    yield embedding(model)
    for layer in range(model.num_hidden_layers):
        yield from norms(model, layer)
        yield from attention(model, layer)
        yield from experts(model.hidden_size, moe, layer) if moe.layers[layer] else dense_mlp(model, layer)
    yield from head(model)


def experts(hidden: int, moe: Experts, layer: int) -> Iterator[Weight]:
    megatron, hf = f"decoder.layers.{layer}.mlp.", f"model.layers.{layer}.mlp."
    yield Weight(megatron + "router.weight", (hf + "gate.weight",), ((moe.num_experts, hidden),))
    for e in range(moe.num_experts):
        ours, theirs = f"{megatron}experts.local_experts.{e}.", f"{hf}experts.{e}."
        yield from gated_mlp(ours, theirs, hidden, moe.moe_intermediate_size, expert=e)
