"""Bytes of a colocated vLLM engine on one GPU: weights, KV cache, and the memory it keeps asleep. vLLM 0.32
takes ``rollout.gpu_memory_utilization`` of the GPU: weights, workspace and graphs first, the rest for KV
cache (v1/worker/gpu_worker.py). It starts only if that share is free then, even if ``rollout.kv_cache_gib``
is set (v1/worker/utils.py, ``request_memory``)."""

from __future__ import annotations

from functools import cache
from math import prod

from megatron_eqlen.hf.config import ModelConfig
from megatron_eqlen.hf.families import weight_map
from megatron_eqlen.job import Job
from megatron_eqlen.plan.activations import BYTES
from megatron_eqlen.plan.flops import attention_layers
from megatron_eqlen.recipe import Recipe
from megatron_eqlen.recipe.layout import VLLM_VOCABULARY

GIB = 2**30
WORKSPACE = 3e9
"""CUDA graphs, and the workspace of sampling and of ``max_num_batched_tokens``; an allowance."""
ASLEEP = 2.5e9
"""Memory that remains after ``sleep(level=2)``: workspaces, torch's groups; an allowance. Users report 2 to 5
GB with the CUDA context, graphs and NCCL's buffers, of which the last two go to sleep here."""
STATE_BYTES = 4
"""Bytes of one number of Gated DeltaNet's state."""

QUANTIZED = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2", "in_proj", "out_proj")
"""Matrices that ``rollout.quantization`` quantizes, by the last part of their name in Megatron-Core."""
BLOCK = 128
QUANTIZED_BYTES = 1 + 4 / BLOCK**2
"""Bytes of a weight in fp8, with a float32 scale for each block of 128 x 128."""


def weights(job: Job) -> float:
    """Return the bytes of weights on one rank of an engine."""
    model, rollout = job.model, job.recipe.rollout
    ranks, each = rollout.tensor_parallel, BYTES[job.recipe.model.dtype]
    if not rollout.quantization:
        return parameters(model, ranks) * each
    quantized, padding = parameters(model, ranks, QUANTIZED), 0
    if experts := model.experts:  # a rank's part of each expert is padded to whole blocks
        missing = -(experts.moe_intermediate_size // ranks) % BLOCK
        padding = sum(experts.layers) * experts.num_experts * 3 * model.hidden_size * missing
    return (quantized + padding) * QUANTIZED_BYTES + (parameters(model, ranks) - quantized) * each


@cache
def parameters(model: ModelConfig, ranks: int, kinds: tuple[str, ...] | None = None) -> float:
    """Return the parameters on one rank of an engine, of these ``kinds`` of matrices (None: all tensors).
    vLLM splits what Megatron-Core splits, replicates key-value heads if too few, and pads the vocabulary."""
    total = 0.0
    for weight in weight_map(model):
        # ``decoder.layers.0.self_attention.linear_qkv.weight``
        *_, module, parameter = weight.megatron.split(".")
        if kinds is not None and (module not in kinds or parameter != "weight"):
            continue
        # A fused tensor is counted as its parts.
        size = sum(map(prod, weight.shapes))
        if weight.dim is None:
            total += size
        # Each rank has a key-value head at least, so on more ranks than heads they are copied.
        elif "linear_qkv" in weight.megatron:
            query, *key_value = map(prod, weight.shapes)
            total += (query + max(1.0, ranks / model.num_key_value_heads) * sum(key_value)) / ranks
        # Rows of the vocabulary, padded before they are divided.
        elif weight.megatron in ("embedding.word_embeddings.weight", "output_layer.weight"):
            total += -(-model.vocab_size // VLLM_VOCABULARY) * VLLM_VOCABULARY * model.hidden_size / ranks
        else:
            total += size / ranks
    return total


def kv_bytes_per_token(job: Job) -> float:
    """Return the bytes of keys and values per token, for all attention layers on one GPU."""
    recipe, model = job.recipe, job.model
    heads = max(1.0, model.num_key_value_heads / recipe.rollout.tensor_parallel)
    in_fp8 = str(recipe.rollout.vllm.get("kv_cache_dtype")).startswith("fp8")
    return 2 * attention_layers(model) * heads * model.head_dim * (1 if in_fp8 else BYTES[recipe.model.dtype])


def requested(recipe: Recipe) -> float:
    """Return the bytes that vLLM requires to be free when it starts."""
    return recipe.rollout.gpu_memory_utilization * recipe.cluster.gpu_memory_gib * GIB


def kv_cache(job: Job) -> float:
    """Return the bytes of the KV cache; negative if weights and workspace exceed vLLM's share of the GPU."""
    if size := job.recipe.rollout.kv_cache_gib:
        return size * GIB
    # What is left of vLLM's share.
    return requested(job.recipe) - weights(job) - WORKSPACE


def sequence_bytes(job: Job, length: float) -> float:
    """Return the KV cache's bytes of ``length`` tokens on one GPU, with Gated DeltaNet's states."""
    cache = length * kv_bytes_per_token(job)
    if (net := job.model.delta_net) is None:
        return cache
    # A state has one size whatever the length: [value heads, key_head_dim, value_head_dim] a layer.
    states = sum(net.layers) * net.num_value_heads * net.key_head_dim * net.value_head_dim
    return cache + states * STATE_BYTES / job.recipe.rollout.tensor_parallel
