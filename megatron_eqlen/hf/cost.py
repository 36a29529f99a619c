"""What a model's forward pass costs, from its shapes."""

from __future__ import annotations

from math import prod

from megatron_eqlen.hf.config import ModelConfig
from megatron_eqlen.hf.families import weight_map


def active_parameters(model: ModelConfig) -> float:
    """Parameters that compute one token: all but the embedding table, and only those experts that a token is
    routed to."""
    routed = model.experts.num_experts_per_tok / model.experts.num_experts if model.experts else 1.0
    return sum(
        sum(prod(shape) for shape in weight.shapes) * (1.0 if weight.expert is None else routed)
        for weight in weight_map(model)
        if model.tie_word_embeddings or not weight.megatron.startswith("embedding.")
    )


def attention_layers(model: ModelConfig) -> int:
    """Layers whose cost grows with what a token sees; the others have a state of fixed size."""
    return model.num_hidden_layers - (sum(model.delta_net.layers) if model.delta_net else 0)


def forward_flops(model: ModelConfig, context: float) -> float:
    """Floating-point operations of the forward pass of a token that sees ``context`` tokens: 2 x active
    parameters, and 4 x layers x heads x head_dim of each pair; Gated DeltaNet's recurrence is left out."""
    pairs = 4 * attention_layers(model) * model.num_attention_heads * model.head_dim
    return 2 * active_parameters(model) + pairs * context


def pair_cost(model: ModelConfig) -> float:
    """Floating-point operations of one visible (query, key) pair in all attention layers, over those of one
    position in all linear layers: 4 x layers x heads x head_dim against 2 x active parameters."""
    return 2 * attention_layers(model) * model.num_attention_heads * model.head_dim / active_parameters(model)
