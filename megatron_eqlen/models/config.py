"""Megatron's ``TransformerConfig`` and HybridModel's arguments of a ``ModelConfig`` and a parallel layout."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.hybrid.hybrid_layer_allocation import Symbols
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from megatron_eqlen.hf.config import Experts, ModelConfig
from megatron_eqlen.megatron_cpu import packages
from megatron_eqlen.recipe import ParallelRecipe, layout


def transformer_config(
    model: ModelConfig, parallel: ParallelRecipe, dtype: torch.dtype, **overrides: Any
) -> TransformerConfig:
    """Return Megatron's configuration of ``model``, split as ``parallel`` says. ``dtype``: of parameters and
    activations. ``overrides``: fields that take precedence. Raises LayoutError if it does not split."""
    layout.require(layout.weights(parallel, model))
    fields: dict[str, Any] = {
        "num_layers": 2 * model.num_hidden_layers,  # a mixer and an MLP are a layer each
        "hidden_size": model.hidden_size,
        "ffn_hidden_size": model.intermediate_size,
        "num_attention_heads": model.num_attention_heads,
        "num_query_groups": model.num_key_value_heads,
        "kv_channels": model.head_dim,
        "normalization": "RMSNorm",
        "layernorm_epsilon": model.rms_norm_eps,
        "layernorm_zero_centered_gamma": model.gated_attention,
        "qk_layernorm": model.qk_norm,
        "add_qkv_bias": model.qkv_bias,
        "attention_output_gate": model.gated_attention,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": False,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "calculate_per_token_loss": True,  # a token's weight holds every factor, so losses are summed
    }
    fields |= _execution_fields(parallel, dtype, sequence=sequence_parallel(model, parallel))
    if model.experts:
        fields |= _expert_fields(model.experts, model.family.glm, dtype)
    if net := model.delta_net:
        fields |= {f"linear_{name}": size for name, size in vars(net).items() if name != "layers"}
    try:
        config = TransformerConfig(**fields | overrides)
    except (AssertionError, ValueError) as error:
        raise ValueError(f"model.megatron: {overrides}: Megatron-Core refuses it: {error}") from error
    if (rope := scaled_rope(model)) is not None:
        set_attention_factor(config, rope[1])
    return config


def hybrid_arguments(model: ModelConfig, parallel: ParallelRecipe) -> dict[str, Any]:
    """Return HybridModel's arguments besides the configuration and the layers' modules."""
    return {
        "hybrid_layer_pattern": _pattern(model, parallel),
        "vocab_size": model.vocab_size,
        "max_sequence_length": model.context_length,
        "position_embedding_type": "rope",
        "rotary_base": model.rope_theta,
        "rotary_percent": model.partial_rotary_factor,
        "share_embeddings_and_output_weights": model.tie_word_embeddings,
    }


def sequence_parallel(model: ModelConfig, parallel: ParallelRecipe) -> bool:
    """Return True if activations between the tensor-parallel parts are split along the sequence."""
    if parallel.tensor == 1:
        return False
    if parallel.sequence is None:
        return layout.needs_sequence_parallel(model) or torch.cuda.is_available()
    return parallel.sequence


def uses_transformer_engine() -> bool:
    """Return True if Transformer Engine imports and a GPU is present."""
    return torch.cuda.is_available() and packages.usable(packages.TRANSFORMER_ENGINE)


def _execution_fields(parallel: ParallelRecipe, dtype: torch.dtype, sequence: bool) -> dict[str, Any]:
    kernels = uses_transformer_engine()
    fused = torch.cuda.is_available() if parallel.fusions is None else parallel.fusions
    fields: dict[str, Any] = {
        "tensor_model_parallel_size": parallel.tensor,
        "pipeline_model_parallel_size": parallel.pipeline,
        "virtual_pipeline_model_parallel_size": parallel.virtual_pipeline,
        "expert_model_parallel_size": parallel.expert,
        "expert_tensor_parallel_size": parallel.expert_tensor,
        "sequence_parallel": sequence,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "variable_seq_lengths": parallel.pipeline > 1,  # rows differ in length
        "bf16": dtype == torch.bfloat16,
        "transformer_impl": "transformer_engine" if kernels else "local",
        "use_cpu_initialization": not torch.cuda.is_available(),
        "perform_initialization": False,  # the weights are always loaded
        "bias_activation_fusion": fused,
        # not gradient_accumulation_fusion: the output layer, no module of TE's, needs Apex's kernel for it
        "apply_rope_fusion": fused and kernels,
        "moe_permute_fusion": fused and kernels,
        "moe_router_fusion": False,  # its kernel chooses experts itself, also where they are given
        "bias_dropout_fusion": False,
        "moe_token_dispatcher_type": "alltoall",
        "masked_softmax_fusion": False,
        "deterministic_mode": torch.are_deterministic_algorithms_enabled(),
    }
    if parallel.virtual_pipeline:  # other combinations hang or mix up activations
        fields |= {"overlap_p2p_comm": True, "batch_p2p_comm": False}
    if parallel.recompute == "full":
        # two of Megatron's layers, a mixer and its MLP, are recomputed together
        fields |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 2}
    elif parallel.recompute == "mlp":
        fields |= {"recompute_granularity": "selective", "recompute_modules": []}  # by ReplayLayer
    return fields


def _pattern(model: ModelConfig, parallel: ParallelRecipe) -> str:
    """Return the symbols of each layer's mixer and MLP, chunk by chunk: ``G-*-|GE*E``."""
    net, moe = model.delta_net, model.experts
    layers = [
        (Symbols.GDN if net and net.layers[n] else Symbols.ATTENTION)
        + (Symbols.MOE if moe and moe.layers[n] else Symbols.MLP)
        for n in range(model.num_hidden_layers)
    ]
    return Symbols.PIPE.join("".join(layers[n] for n in chunk) for chunk in layout.stages(parallel, model))


def _expert_fields(experts: Experts, glm: bool, dtype: torch.dtype) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "num_moe_experts": experts.num_experts,
        "moe_ffn_hidden_size": experts.moe_intermediate_size,
        "moe_router_topk": experts.num_experts_per_tok,
        "moe_router_pre_softmax": not experts.norm_topk_prob,
        "moe_router_dtype": "fp64" if dtype == torch.float64 else "fp32",
        "moe_router_load_balancing_type": "none",
        "moe_grouped_gemm": uses_transformer_engine(),
    }
    # one more expert, which every token passes
    if experts.shared_expert_intermediate_size:
        fields["moe_shared_expert_intermediate_size"] = experts.shared_expert_intermediate_size
        fields["moe_shared_expert_gate"] = not glm
    if glm:
        fields["moe_router_score_function"] = "sigmoid"
        fields["moe_router_topk_scaling_factor"] = experts.routed_scaling_factor
    return fields


def scaled_rope(model: ModelConfig) -> tuple[Tensor, float] | None:
    """Return (angles per position, [rotated dimensions / 2] float32; factor of cosine and sine) as
    Transformers computes them; None if the model does not scale its frequencies."""
    if not model.rope_scaling:
        return None
    from transformers import PreTrainedConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = {"rope_theta": model.rope_theta, "partial_rotary_factor": model.partial_rotary_factor}
    rope |= dict(model.rope_scaling)
    sizes = ("head_dim", "hidden_size", "num_attention_heads", "max_position_embeddings")
    fields: dict[str, Any] = {name: getattr(model, name) for name in sizes} | {"rope_parameters": rope}
    # the functions read a configuration's fields, so a plain one with these will do
    config = PreTrainedConfig(**fields)
    return ROPE_INIT_FUNCTIONS[str(rope["rope_type"])](config, torch.device("cpu"))


def set_attention_factor(config: TransformerConfig, factor: float) -> None:
    """Make Megatron's attention multiply cosine and sine by ``factor``. Megatron reads three undeclared
    fields and computes (0.1 ``mscale`` ln(``scaling``) + 1) / (0.1 ``mscale_all_dim`` ln(``scaling``) + 1):
    with ln(scaling) = 10 that is ``mscale`` + 1 over 1."""
    fields = {"rotary_scaling_factor": math.exp(10), "mscale": factor - 1, "mscale_all_dim": 0.0}
    for name, value in fields.items():
        setattr(config, f"yarn_{name}", value)
