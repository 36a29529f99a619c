"""Tensors of every model family by Hugging Face's and Megatron's names. Models are made of a few parts, each
a generator of ``Weight``. Multi-token prediction (``mtp.*``) is not trained; conversion carries it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from megatron_eqlen.hf.config import DeltaNet, Experts, ModelConfig
from megatron_eqlen.hf.weight_map import DeltaNetInput, GroupedHeads, Stacked, Weight

HEAD = "lm_head.weight"


@cache
def weight_map(model: ModelConfig) -> tuple[Weight, ...]:
    """Return every tensor of ``model``, in the model's order."""
    return tuple(_weights(model))


def _weights(model: ModelConfig) -> Iterator[Weight]:
    net, moe = model.delta_net, model.experts
    yield embedding(model)
    for layer in range(model.num_hidden_layers):
        yield from norms(model, layer)
        yield from delta_net(model, net, layer) if net and net.layers[layer] else attention(model, layer)
        if moe and moe.layers[layer]:
            yield from experts(model, moe, layer)
            if moe.shared_expert_intermediate_size:
                yield from shared_expert(model, moe, layer)
        else:
            mlp, hidden = f"layers.{layer}.mlp.", model.hidden_size
            yield from gated_mlp(f"decoder.{mlp}", model.prefix + mlp, hidden, model.intermediate_size)
    yield from head(model)


def embedding(model: ModelConfig) -> Weight:
    name, shape = model.prefix + "embed_tokens.weight", (model.vocab_size, model.hidden_size)
    return Weight("embedding.word_embeddings.weight", (name,), (shape,), dim=0)


def head(model: ModelConfig) -> Iterator[Weight]:
    yield Weight("decoder.final_norm.weight", (model.prefix + "norm.weight",), ((model.hidden_size,),))
    if not model.tie_word_embeddings:
        shape = (model.vocab_size, model.hidden_size)
        yield Weight("output_layer.weight", (HEAD,), (shape,), dim=0)


def norms(model: ModelConfig, layer: int) -> Iterator[Weight]:
    megatron, hf, shape = f"decoder.layers.{layer}.", f"{model.prefix}layers.{layer}.", (model.hidden_size,)
    yield Weight(megatron + "input_layernorm.weight", (hf + "input_layernorm.weight",), (shape,))
    yield Weight(megatron + "pre_mlp_layernorm.weight", (hf + "post_attention_layernorm.weight",), (shape,))


def attention(model: ModelConfig, layer: int) -> Iterator[Weight]:
    megatron, hf = f"decoder.layers.{layer}.self_attention.", f"{model.prefix}layers.{layer}.self_attn."
    hidden, heads, groups = model.hidden_size, model.num_attention_heads, model.num_key_value_heads
    # Rows of the projections: q [query, or 2 x query with gates], k [key], v [key]; columns [hidden].
    query, key = heads * model.head_dim, groups * model.head_dim
    rows = (2 * query if model.gated_attention else query), key, key
    for kind, row in {"weight": (hidden,), "bias": ()}.items():
        if kind == "weight" or model.qkv_bias:
            yield Weight(
                f"{megatron}linear_qkv.{kind}",
                tuple(f"{hf}{name}_proj.{kind}" for name in "qkv"),
                tuple((count, *row) for count in rows),
                dim=0,
                arrangement=GroupedHeads(model.head_dim, heads // groups, model.gated_attention),
            )
    yield Weight(megatron + "linear_proj.weight", (hf + "o_proj.weight",), ((hidden, query),), dim=1)
    if model.qk_norm:
        yield Weight(megatron + "q_layernorm.weight", (hf + "q_norm.weight",), ((model.head_dim,),))
        yield Weight(megatron + "k_layernorm.weight", (hf + "k_norm.weight",), ((model.head_dim,),))


def gated_mlp(megatron: str, hf: str, hidden: int, width: int, expert: int | None = None) -> Iterator[Weight]:
    """Yield the gate, up and down projections; ``megatron`` and ``hf`` are prefixes of names."""
    yield Weight(
        megatron + "linear_fc1.weight",
        (hf + "gate_proj.weight", hf + "up_proj.weight"),
        # gate [width, hidden], up [width, hidden]
        ((width, hidden), (width, hidden)),
        dim=0,
        arrangement=Stacked((1, 1)),
        expert=expert,
    )
    down = hf + "down_proj.weight"
    yield Weight(megatron + "linear_fc2.weight", (down,), ((hidden, width),), dim=1, expert=expert)


def experts(model: ModelConfig, moe: Experts, layer: int) -> Iterator[Weight]:
    megatron, hf = f"decoder.layers.{layer}.mlp.", f"{model.prefix}layers.{layer}.mlp."
    # [experts, hidden], whole on each rank.
    yield Weight(megatron + "router.weight", (hf + "gate.weight",), ((moe.num_experts, model.hidden_size),))
    if model.family.glm:
        name, shape = hf + "gate.e_score_correction_bias", (moe.num_experts,)
        yield Weight(megatron + "router.expert_bias", (name,), (shape,), trained=False)
    for e in range(moe.num_experts):
        ours, theirs = f"{megatron}experts.local_experts.{e}.", f"{hf}experts.{e}."
        yield from gated_mlp(ours, theirs, model.hidden_size, moe.moe_intermediate_size, expert=e)


def delta_net(model: ModelConfig, net: DeltaNet, layer: int) -> Iterator[Weight]:
    megatron, hf = f"decoder.layers.{layer}.self_attention.", f"{model.prefix}layers.{layer}.linear_attn."
    keys, values = net.num_key_heads * net.key_head_dim, net.num_value_heads * net.value_head_dim
    hidden, per_value_head = model.hidden_size, ((net.num_value_heads,),)
    # The convolution mixes q, k, v [keys + keys + values]; z gates [values]; beta, alpha [value heads].
    mixed, heads = (keys, keys, values), net.num_value_heads
    # Four tensors, or two in which each key head's rows lie together.
    if model.family.separate_projections:
        rows = sum(mixed), values, heads, heads
        arrangement = Stacked(rows)
        names = "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"
    else:
        rows = sum(mixed) + values, 2 * heads
        arrangement = DeltaNetInput(net.key_head_dim, net.value_head_dim, heads // net.num_key_heads)
        names = "in_proj_qkvz", "in_proj_ba"
    yield Weight(
        megatron + "in_proj.weight",
        tuple(f"{hf}{name}.weight" for name in names),
        tuple((count, hidden) for count in rows),
        dim=0,
        sections=mixed if model.family.separate_projections else (),
        arrangement=arrangement,
    )
    # A depthwise convolution: [channels, 1, kernel].
    shape = (sum(mixed), 1, net.conv_kernel_dim)
    yield Weight(megatron + "conv1d.weight", (hf + "conv1d.weight",), (shape,), dim=0, sections=mixed)
    yield Weight(megatron + "dt_bias", (hf + "dt_bias",), per_value_head, dim=0)
    yield Weight(megatron + "A_log", (hf + "A_log",), per_value_head, dim=0)
    yield Weight(megatron + "out_norm.weight", (hf + "norm.weight",), ((net.value_head_dim,),))
    yield Weight(megatron + "out_proj.weight", (hf + "out_proj.weight",), ((hidden, values),), dim=1)


def shared_expert(model: ModelConfig, moe: Experts, layer: int) -> Iterator[Weight]:
    megatron, hf = f"decoder.layers.{layer}.mlp.", f"{model.prefix}layers.{layer}.mlp."
    width, hidden = moe.shared_expert_intermediate_size, model.hidden_size
    name = "shared_experts." if model.family.glm else "shared_expert."
    yield from gated_mlp(megatron + "shared_experts.", hf + name, hidden, width)
    if model.family.glm:
        return
    gate = hf + "shared_expert_gate.weight"
    yield Weight(megatron + "shared_experts.gate_weight", (gate,), ((1, hidden),))
