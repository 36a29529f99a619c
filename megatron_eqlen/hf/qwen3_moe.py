"""Weight map of the Qwen3-MoE models: Qwen3's attention, a router and experts."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_eqlen.hf.config import ModelConfig
from megatron_eqlen.hf.qwen3 import attention, dense_mlp, embedding, gated_mlp, head, norms
from megatron_eqlen.hf.weight_map import Weight


def weights(model: ModelConfig) -> Iterator[Weight]:
    yield embedding(model)
    for layer in range(model.num_hidden_layers):
        yield from norms(model, layer)
        yield from attention(model, layer)
        yield from experts(model, layer) if model.experts.layers[layer] else dense_mlp(model, layer)
    yield from head(model)


def experts(model: ModelConfig, layer: int) -> Iterator[Weight]:
    here, there = f"decoder.layers.{layer}.mlp.", f"model.layers.{layer}.mlp."
    hidden, width, count = model.hidden_size, model.experts.moe_intermediate_size, model.experts.num_experts
    yield Weight(here + "router.weight", (there + "gate.weight",), ((count, hidden),))
    for e in range(count):
        ours, theirs = f"{here}experts.local_experts.{e}.", f"{there}experts.{e}."
        yield from gated_mlp(ours, theirs, hidden, width, expert=e)
