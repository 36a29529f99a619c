"""Read Hugging Face's ``config.json`` into a ``ModelConfig``. Every value comes from the file; only
``tie_word_embeddings`` has a default, as Llama's files omit it. An unsupported field that changes the result
is an error that names it. ``config_fields.FAMILIES`` lists the families."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from megatron_eqlen.files import read_json
from megatron_eqlen.hf import config_fields
from megatron_eqlen.hf.config_fields import FAMILIES, OF_IMAGES, ConfigError, Family, Fields

SIZES = ("vocab_size", "num_key_value_heads", "max_position_embeddings")
LINEAR = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim")
"""Sizes of Gated DeltaNet that have the same names in the file, after ``linear_``."""


@dataclass(frozen=True)
class Experts:
    """Sparse feed-forward layers."""

    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    norm_topk_prob: bool
    shared_expert_intermediate_size: int
    """0: no shared expert. Several shared experts are one of their summed size."""
    layers: tuple[bool, ...]
    """Per layer: True for experts, False for a dense feed-forward layer."""
    routed_scaling_factor: float = 1.0
    """Factor of the experts' weights."""


@dataclass(frozen=True)
class DeltaNet:
    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_kernel_dim: int
    layers: tuple[bool, ...]
    """Per layer: True for Gated DeltaNet, False for attention."""


@dataclass(frozen=True)
class ModelConfig:
    """Model configuration, in the field names of config.json."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    partial_rotary_factor: float
    tie_word_embeddings: bool
    experts: Experts | None = None
    delta_net: DeltaNet | None = None
    rope_scaling: config_fields.Scaling = ()
    prefix: str = "model."
    """Prefix of the names of tensors in the model's files, except the output layer's."""
    qkv_bias: bool = False
    qk_norm: bool = True
    # Of the weights, as the file says; "" if it does not.
    dtype: str = field(default="", compare=False)

    @property
    def family(self) -> Family:
        return FAMILIES[self.model_type]

    @property
    def context_length(self) -> int:
        """Maximum number of positions. Qwen's files reach longer contexts by adding yarn alone, and
        ``max_position_embeddings`` keeps the original length; Llama's count the extended one."""
        if not self.has_yarn:
            return self.max_position_embeddings
        rope = dict(self.rope_scaling)
        return int(rope["factor"] * rope["original_max_position_embeddings"])

    @property
    def reads_images(self) -> bool:
        """True for the text part of a model of texts and images."""
        return self.prefix != "model."

    @property
    def has_yarn(self) -> bool:
        return ("rope_type", "yarn") in self.rope_scaling

    @property
    def moe_layers(self) -> list[int]:
        """Indices of the layers with experts."""
        return [i for i, sparse in enumerate(self.experts.layers) if sparse] if self.experts else []

    @property
    def gated_attention(self) -> bool:
        """True if q_proj holds an output gate beside each query head; norms are then centred on zero."""
        return self.family.hybrid


def read_config(path: str | Path) -> ModelConfig:
    """Return the model of ``path``: a config.json or a folder that contains it. Raises ConfigError."""
    path = Path(path)
    file = path if path.suffix == ".json" else path / "config.json"
    if not file.exists():
        raise ConfigError(f"{file}: no such file{_instead(file.parent)}")
    try:
        raw = read_json(file)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{file}: expected a JSON object, found a {type(raw).__name__}")
    return parse_config(raw, str(file))


def _instead(folder: Path) -> str:
    """Return what a folder without a config.json is, where that can be seen."""
    if (adapter := folder / "adapter_config.json").is_file():
        base = read_json(adapter).get("base_model_name_or_path")
        return f": the folder holds adapters (PEFT) of {base}: merge them, or name that model"
    if any(folder.glob("*.gguf")):
        return ": the folder holds GGUF, which `tools/make_smollm2.py --out FOLDER --gguf FILE` converts"
    return ""


def parse_config(raw: Mapping[str, Any], where: str) -> ModelConfig:
    """Return the model that the fields ``raw`` describe; ``where`` names the file in errors."""
    fields = Fields(raw, where)
    name = fields.get("model_type", str)
    # Images are not read: the model of texts inside is trained alone.
    if name in OF_IMAGES:
        return _text_model(fields, OF_IMAGES[name])
    if name not in FAMILIES:
        expected = f"one of {', '.join([*FAMILIES, *OF_IMAGES])}"
        how = "a new family is added in megatron_eqlen/hf/config_fields.py; see docs/extending.md"
        raise ConfigError(f"{where}: model_type: expected {expected}, found {name!r} ({how})")
    family = FAMILIES[name]
    layers = fields.get("num_hidden_layers", int)
    config_fields.refuse_unsupported(fields, name, layers)
    heads = fields.get("num_attention_heads", int)
    hidden = fields.get("hidden_size", int)
    model = ModelConfig(
        model_type=name,
        **{name: fields.get(name, int) for name in SIZES},
        hidden_size=hidden,
        # without dense layers nothing has this size, and files do not state it
        intermediate_size=fields.get(
            "moe_intermediate_size" if family.only_experts else "intermediate_size", int
        ),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        head_dim=_head_dim(fields, family, hidden, heads),
        rms_norm_eps=fields.get("rms_norm_eps", float),
        **config_fields.read_rope(fields, partial=family.hybrid or family.glm),
        tie_word_embeddings=fields.optional("tie_word_embeddings", bool, False),
        experts=_experts(fields, layers, family) if family.experts else None,
        delta_net=_delta_net(fields, layers) if family.hybrid else None,
        qkv_bias=fields.get("attention_bias", bool) if family.glm else family.qkv_bias,
        qk_norm=fields.get("use_qk_norm", bool) if family.glm else family.qk_norm,
        dtype=fields.optional("dtype", str, fields.optional("torch_dtype", str, "")),
    )
    _check_sizes(model, where)
    return model


def _text_model(whole: Fields, model_type: str) -> ModelConfig:
    """Return the text model of a model of texts and images."""
    where = f"{whole.where}: text_config"
    text = Fields(whole.get("text_config", dict), where)
    if (name := text.get("model_type", str)) != model_type:
        raise ConfigError(f"{where}: model_type: expected {model_type!r}, found {name!r}")
    # Keys that stand both outside and in ``text_config``, where readers may look in either place.
    for key in ("tie_word_embeddings", "quantization_config"):
        outer, inner = (fields.raw.get(key) or None for fields in (whole, text))
        if outer != inner:
            raise whole.error(f"{key} is {outer} but text_config.{key} is {inner}")
    return replace(parse_config(text.raw, where), prefix="model.language_model.")


def _head_dim(fields: Fields, family: Family, hidden: int, heads: int) -> int:
    """Return ``head_dim``, or the heads' share of ``hidden_size`` where a file may omit it."""
    if family.head_dim == "given":
        return fields.get("head_dim", int)
    given = fields.optional("head_dim", int, None)
    # A computed size must be the given one, since vLLM computes it.
    if given is not None and (family.head_dim == "optional" or given * heads == hidden):
        return given
    if given is not None or hidden % heads:
        expected = f"num_attention_heads {heads} x head_dim"
        raise fields.error(f"hidden_size {hidden}: expected {expected}, found head_dim {given}")
    return hidden // heads


def _check_sizes(model: ModelConfig, where: str) -> None:
    """Refuse sizes that contradict each other in any layout."""
    # Field: (number, name of its divisor, divisor)
    multiples = {
        "num_attention_heads": (model.num_attention_heads, "num_key_value_heads", model.num_key_value_heads),
        "head_dim x partial_rotary_factor": (int(model.head_dim * model.partial_rotary_factor), "2", 2),
    }
    if net := model.delta_net:
        multiples["linear_num_value_heads"] = net.num_value_heads, "linear_num_key_heads", net.num_key_heads
    for key, (number, name, divisor) in multiples.items():
        if number % divisor or not number:
            of = name if name == str(divisor) else f"{name} {divisor}"
            raise ConfigError(f"{where}: {key}: expected a multiple of {of}, found {number}")
    if (experts := model.experts) and experts.num_experts_per_tok > experts.num_experts:
        expected = f"at most num_experts {experts.num_experts}"
        found = experts.num_experts_per_tok
        raise ConfigError(f"{where}: num_experts_per_tok: expected {expected}, found {found}")


def _experts(fields: Fields, layers: int, family: Family) -> Experts:
    if family.glm:
        # GLM counts shared experts, each as wide as a routed one; together they are one wider expert.
        count, shared = fields.get("n_routed_experts", int), fields.get("n_shared_experts", int)
        shared *= fields.get("moe_intermediate_size", int)
    else:
        count = fields.one_of("num_experts", "num_local_experts", int)
        shared = fields.get("shared_expert_intermediate_size", int) if family.shared_expert else 0
    per_token = fields.get("num_experts_per_tok", int)
    normalised = family.only_experts or fields.get("norm_topk_prob", bool)
    if per_token == 1 and normalised:
        raise fields.error("norm_topk_prob: one expert a token would get a constant 1")
    if fields.optional("output_router_logits", bool, False):
        warnings.warn(f"{fields.where}: the router's auxiliary loss is not trained with", stacklevel=2)
    return Experts(
        num_experts=count,
        num_experts_per_tok=per_token,
        moe_intermediate_size=fields.get("moe_intermediate_size", int),
        norm_topk_prob=normalised,
        shared_expert_intermediate_size=shared,
        layers=_sparse_layers(fields, family, layers),
        routed_scaling_factor=fields.get("routed_scaling_factor", float) if family.glm else 1.0,
    )


def _sparse_layers(fields: Fields, family: Family, layers: int) -> tuple[bool, ...]:
    if family.only_experts:
        return (True,) * layers
    if family.glm:
        # The first layers are dense.
        first = fields.get("first_k_dense_replace", int, least=0)
        return tuple(layer >= first for layer in range(layers))
    step, dense = fields.get("decoder_sparse_step", int), fields.get_or_null("mlp_only_layers", list, [])
    if odd := [layer for layer in dense if type(layer) is not int]:
        raise fields.error(f"mlp_only_layers: expected numbers of layers, found {odd[0]!r}")
    # Every ``decoder_sparse_step``-th layer has experts, counted from 1, unless it is listed as dense.
    return tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(layers))


def _delta_net(fields: Fields, layers: int) -> DeltaNet:
    if (kinds := fields.optional("layer_types", list, None)) is not None:
        linear = tuple(kind == "linear_attention" for kind in kinds)
    else:
        interval = fields.get("full_attention_interval", int)
        # With an interval of 4, layers 3, 7, 11, ... have full attention.
        linear = tuple((i + 1) % interval != 0 for i in range(layers))
    return DeltaNet(**{name: fields.get(f"linear_{name}", int) for name in LINEAR}, layers=linear)
