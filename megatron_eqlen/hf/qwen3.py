"""Weight map of the dense Qwen3 models, and the parts that other families share."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_eqlen.hf.config import ModelConfig
from megatron_eqlen.hf.weight_map import GroupedHeads, Stacked, Weight


def weights(model: ModelConfig) -> Iterator[Weight]:
    yield embedding(model)
    for layer in range(model.num_hidden_layers):
        yield from norms(model, layer)
        yield from attention(model, layer)
        yield from dense_mlp(model, layer)
    yield from head(model)


def embedding(model: ModelConfig) -> Weight:
    shape = (model.vocab_size, model.hidden_size)
    return Weight("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), (shape,), dim=0)


def head(model: ModelConfig) -> Iterator[Weight]:
    yield Weight("decoder.final_layernorm.weight", ("model.norm.weight",), ((model.hidden_size,),))
    if not model.tie_word_embeddings:
        shape = (model.vocab_size, model.hidden_size)
        yield Weight("output_layer.weight", ("lm_head.weight",), (shape,), dim=0)


def norms(model: ModelConfig, layer: int) -> Iterator[Weight]:
    megatron, hf, shape = f"decoder.layers.{layer}.", f"model.layers.{layer}.", (model.hidden_size,)
    yield Weight(megatron + "input_layernorm.weight", (hf + "input_layernorm.weight",), (shape,))
    yield Weight(megatron + "pre_mlp_layernorm.weight", (hf + "post_attention_layernorm.weight",), (shape,))


def attention(model: ModelConfig, layer: int) -> Iterator[Weight]:
    megatron, hf = f"decoder.layers.{layer}.self_attention.", f"model.layers.{layer}.self_attn."
    hidden, heads, groups = model.hidden_size, model.num_attention_heads, model.num_key_value_heads
    query, key = heads * model.head_dim, groups * model.head_dim
    gated = model.gated_attention
    yield Weight(
        megatron + "linear_qkv.weight",
        (hf + "q_proj.weight", hf + "k_proj.weight", hf + "v_proj.weight"),
        ((2 * query if gated else query, hidden), (key, hidden), (key, hidden)),
        dim=0,
        arrangement=GroupedHeads(model.head_dim, heads // groups, gated),
    )
    yield Weight(megatron + "linear_proj.weight", (hf + "o_proj.weight",), ((hidden, query),), dim=1)
    yield Weight(megatron + "q_layernorm.weight", (hf + "q_norm.weight",), ((model.head_dim,),))
    yield Weight(megatron + "k_layernorm.weight", (hf + "k_norm.weight",), ((model.head_dim,),))


def dense_mlp(model: ModelConfig, layer: int) -> Iterator[Weight]:
    megatron, hf = f"decoder.layers.{layer}.mlp.", f"model.layers.{layer}.mlp."
    yield from gated_mlp(megatron, hf, model.hidden_size, model.intermediate_size)


def gated_mlp(megatron: str, hf: str, hidden: int, width: int, expert: int | None = None) -> Iterator[Weight]:
    """Yield the gate, up and down projections; ``megatron`` and ``hf``: Megatron's and Hugging Face's
    prefixes."""
    yield Weight(
        megatron + "linear_fc1.weight",
        (hf + "gate_proj.weight", hf + "up_proj.weight"),
        ((width, hidden), (width, hidden)),
        dim=0,
        arrangement=Stacked(),
        expert=expert,
    )
    down = hf + "down_proj.weight"
    yield Weight(megatron + "linear_fc2.weight", (down,), ((hidden, width),), dim=1, expert=expert)
