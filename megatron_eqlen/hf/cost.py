"""Cost of a model's forward pass, computed from its shapes."""

from __future__ import annotations

from math import prod

from megatron_eqlen.hf.config import ModelConfig
from megatron_eqlen.hf.families import weight_map


def active_parameters(model: ModelConfig) -> float:
    """Return the parameters that compute one token: all but the embedding table and the experts that the
    token is not routed to."""
    routed = model.experts.num_experts_per_tok / model.experts.num_experts if model.experts else 1.0
    return sum(
        sum(prod(shape) for shape in weight.shapes) * (1.0 if weight.expert is None else routed)
        for weight in weight_map(model)
        if model.tie_word_embeddings or not weight.megatron.startswith("embedding.")
    )


def attention_layers(model: ModelConfig) -> int:
    """Return the number of layers whose cost grows with the context; the others have a state of fixed
    size."""
    return model.num_hidden_layers - (sum(model.delta_net.layers) if model.delta_net else 0)


def forward_flops(model: ModelConfig, context: float) -> float:
    """Return the floating-point operations of the forward pass of a token that sees ``context`` tokens: 2 x
    active parameters, and 4 x layers x heads x head_dim per pair; Gated DeltaNet's recurrence is not counted.
    """
    pairs = 4 * attention_layers(model) * model.num_attention_heads * model.head_dim
    return 2 * active_parameters(model) + pairs * context


def pair_cost(model: ModelConfig) -> float:
    """Return the cost of one visible (query, key) pair in all attention layers relative to one position in
    all linear layers: 4 x layers x heads x head_dim over 2 x active parameters."""
    return 2 * attention_layers(model) * model.num_attention_heads * model.head_dim / active_parameters(model)
