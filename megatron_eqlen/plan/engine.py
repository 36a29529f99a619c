"""Bytes of a colocated vLLM engine on one GPU: its weights, its KV cache, and what it keeps asleep.

vLLM 0.31 takes ``rollout.gpu_memory_utilization`` of the GPU: weights, workspace and graphs first, the rest
is KV cache (v1/worker/gpu_worker.py). It starts only where that share of the GPU is free at that moment, with
``rollout.kv_cache_gib`` set too (v1/worker/utils.py, ``request_memory``).
"""

from __future__ import annotations

from math import prod

from megatron_eqlen.hf.config import ModelConfig
from megatron_eqlen.hf.cost import attention_layers
from megatron_eqlen.hf.families import weight_map
from megatron_eqlen.plan.activations import BYTES
from megatron_eqlen.recipe import Recipe
from megatron_eqlen.recipe.layout import VLLM_VOCABULARY

GIB = 2**30
WORKSPACE = 3e9
"""CUDA graphs, and the workspace of a forward pass of ``max_num_batched_tokens``; an allowance."""
ASLEEP = 3.5e9
"""What ``sleep(level=2)`` leaves: graphs, NCCL buffers, workspaces; an allowance. With the CUDA context
4 GB, of the 2 to 5 that users of vLLM's sleep mode report."""
STATE_BYTES = 4
"""Of a number of Gated DeltaNet's state."""


def weights(recipe: Recipe, model: ModelConfig) -> float:
    return parameters(model, recipe.rollout.tensor_parallel) * BYTES[recipe.model.dtype]


def parameters(model: ModelConfig, ranks: int) -> float:
    """Of one of an engine's ranks. vLLM divides every tensor that Megatron-Core divides, experts too;
    key-value heads that are fewer than the ranks are copied, the vocabulary is padded."""
    found = 0.0
    for weight in weight_map(model):
        size = sum(map(prod, weight.shapes))
        if weight.dim is None:
            found += size
        elif "linear_qkv" in weight.megatron:
            query, *key_value = map(prod, weight.shapes)
            found += (query + max(1.0, ranks / model.num_key_value_heads) * sum(key_value)) / ranks
        elif weight.megatron in ("embedding.word_embeddings.weight", "output_layer.weight"):
            found += -(-model.vocab_size // VLLM_VOCABULARY) * VLLM_VOCABULARY * model.hidden_size / ranks
        else:
            found += size / ranks
    return found


def kv_bytes_per_token(recipe: Recipe, model: ModelConfig) -> float:
    """Keys and values of all attention layers, on one GPU."""
    heads = max(1.0, model.num_key_value_heads / recipe.rollout.tensor_parallel)
    return 2 * attention_layers(model) * heads * model.head_dim * BYTES[recipe.model.dtype]


def state_bytes_per_sequence(recipe: Recipe, model: ModelConfig) -> float:
    """The states of all Gated DeltaNet layers, on one GPU."""
    if (net := model.delta_net) is None:
        return 0.0
    elements = net.num_value_heads * net.key_head_dim * net.value_head_dim
    return sum(net.layers) * elements * STATE_BYTES / recipe.rollout.tensor_parallel


def requested(recipe: Recipe) -> float:
    """What vLLM wants free when it starts."""
    return recipe.rollout.gpu_memory_utilization * recipe.cluster.gpu_memory_gib * GIB


def kv_cache(recipe: Recipe, model: ModelConfig) -> float:
    """Negative where weights and workspace alone are more than vLLM may take."""
    if recipe.rollout.kv_cache_gib:
        return recipe.rollout.kv_cache_gib * GIB
    return requested(recipe) - weights(recipe, model) - WORKSPACE


def sequences_at_once(recipe: Recipe, model: ModelConfig, mean_length: float) -> float:
    """Sequences of ``mean_length`` tokens, prompt included, that the KV cache holds; at most
    ``max_num_seqs``."""
    each = mean_length * kv_bytes_per_token(recipe, model) + state_bytes_per_sequence(recipe, model)
    return min(recipe.rollout.max_num_seqs, kv_cache(recipe, model) / each)
