"""Hugging Face ``config.json`` -> what a model is (``ModelConfig``).

Every value comes from the file; no default of any library's configuration class stands in for one that is
missing. A field that changes the result and is not supported is an error that names it. Families:
``qwen3`` (dense), ``qwen3_moe``, ``qwen3_next`` (Gated DeltaNet, gated attention, shared expert).
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

Family = Literal["qwen3", "qwen3_moe", "qwen3_next"]
FAMILIES: tuple[Family, ...] = ("qwen3", "qwen3_moe", "qwen3_next")


class ConfigError(ValueError):
    """A config.json that cannot be built here; the message names the file and the field."""


@dataclass(frozen=True)
class Experts:
    """The sparse feed-forward layers."""

    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    norm_topk_prob: bool
    router_aux_loss_coef: float
    """0 where the file does not ask for the router's logits: then Transformers adds no loss either."""
    shared_expert_intermediate_size: int | None
    layers: tuple[bool, ...]
    """Per layer: experts, or a dense feed-forward layer."""


@dataclass(frozen=True)
class DeltaNet:
    """The Gated DeltaNet layers."""

    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_kernel_dim: int
    layers: tuple[bool, ...]
    """Per layer: Gated DeltaNet, or attention."""


@dataclass(frozen=True)
class ModelConfig:
    """One model, in the field names of its config.json."""

    model_type: Family
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

    @property
    def gated_attention(self) -> bool:
        """q_proj holds an output gate beside each query head; norms are centred on zero."""
        return self.model_type == "qwen3_next"


def read_config(path: str | Path) -> ModelConfig:
    """The model of ``path``: a config.json or a folder with one. Raises ConfigError."""
    file = config_file(path)
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{file}: no such file") from None
    except json.JSONDecodeError as error:
        raise ConfigError(f"{file}: not valid JSON: {error}") from None
    return parse_config(raw, str(file))


def config_file(path: str | Path) -> Path:
    path = Path(path)
    return path if path.suffix == ".json" else path / "config.json"


def parse_config(raw: Mapping[str, Any], where: str) -> ModelConfig:
    """The model that the fields ``raw`` describe; ``where`` names them in errors."""
    fields = _Fields(raw, where)
    family = fields.get("model_type", str)
    if family not in FAMILIES:
        raise ConfigError(f"{where}: model_type: expected one of {', '.join(FAMILIES)}, found {family!r}")
    _refuse_unsupported(fields, family)
    heads = fields.get("num_attention_heads", int)
    hidden = fields.get("hidden_size", int)
    if family == "qwen3_moe" and "head_dim" not in raw:  # the one family whose files may leave it out
        head_dim = hidden // heads
    else:
        head_dim = fields.get("head_dim", int)
    theta, rotary = _rope(fields, family)
    layers = fields.get("num_hidden_layers", int)
    model = ModelConfig(
        model_type=family,
        vocab_size=fields.get("vocab_size", int),
        hidden_size=hidden,
        intermediate_size=fields.get("intermediate_size", int),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=fields.get("num_key_value_heads", int),
        head_dim=head_dim,
        max_position_embeddings=fields.get("max_position_embeddings", int),
        rms_norm_eps=fields.get("rms_norm_eps", float),
        rope_theta=theta,
        partial_rotary_factor=rotary,
        tie_word_embeddings=fields.get("tie_word_embeddings", bool),
        experts=None if family == "qwen3" else _experts(fields, layers, shared=family == "qwen3_next"),
        delta_net=_delta_net(fields, layers) if family == "qwen3_next" else None,
    )
    fields.warn_of_unread()
    return model


def _rope(fields: _Fields, family: Family) -> tuple[float, float]:
    """(rope_theta, partial_rotary_factor), from the fields of old files or the dict of new ones."""
    new = fields.raw.get("rope_parameters") or {}
    for key in ("rope_scaling", "rope_parameters"):
        rope = fields.raw.get(key) or {}
        if (kind := rope.get("rope_type", rope.get("type", "default"))) != "default":
            raise ConfigError(f"{fields.where}: {key}.rope_type: only 'default' is supported, found {kind!r}")
    both = {**new, **{key: fields.raw[key] for key in _ROPE_KEYS if key in fields.raw}}
    for key in _ROPE_KEYS:
        if key in new and new[key] != both[key]:
            raise ConfigError(f"{fields.where}: {key} is {both[key]} but rope_parameters.{key} is {new[key]}")
    if "rope_theta" not in both:
        raise ConfigError(f"{fields.where}: missing field 'rope_theta' (or rope_parameters.rope_theta)")
    if family != "qwen3_next" and both.get("partial_rotary_factor", 1.0) != 1.0:
        raise ConfigError(
            f"{fields.where}: partial_rotary_factor: Transformers ignores it in {family} models"
        )
    if family == "qwen3_next" and "partial_rotary_factor" not in both:
        raise ConfigError(f"{fields.where}: missing field 'partial_rotary_factor'")
    return float(both["rope_theta"]), float(both.get("partial_rotary_factor", 1.0))


def _experts(fields: _Fields, layers: int, shared: bool) -> Experts:
    count = "num_local_experts" if "num_local_experts" in fields.raw else "num_experts"
    if count not in fields.raw:
        raise ConfigError(f"{fields.where}: missing field 'num_experts' (or 'num_local_experts')")
    step, dense = fields.get("decoder_sparse_step", int), fields.get("mlp_only_layers", list)
    per_token, normalised = fields.get("num_experts_per_tok", int), fields.get("norm_topk_prob", bool)
    if per_token == 1 and normalised:
        raise ConfigError(f"{fields.where}: norm_topk_prob: one expert a token would get a constant 1")
    has_loss = fields.raw.get("output_router_logits", False)
    return Experts(
        num_experts=fields.get(count, int),
        num_experts_per_tok=per_token,
        moe_intermediate_size=fields.get("moe_intermediate_size", int),
        norm_topk_prob=normalised,
        router_aux_loss_coef=fields.get("router_aux_loss_coef", float) if has_loss else 0.0,
        shared_expert_intermediate_size=(
            fields.get("shared_expert_intermediate_size", int) if shared else None
        ),
        layers=tuple(i not in dense and (i + 1) % step == 0 for i in range(layers)),
    )


def _delta_net(fields: _Fields, layers: int) -> DeltaNet:
    if "layer_types" in fields.raw:
        linear = tuple(kind == "linear_attention" for kind in fields.get("layer_types", list))
    else:
        interval = fields.get("full_attention_interval", int)
        linear = tuple((i + 1) % interval != 0 for i in range(layers))
    if len(linear) != layers:
        raise ConfigError(f"{fields.where}: layer_types: expected {layers} entries, found {len(linear)}")
    return DeltaNet(
        num_key_heads=fields.get("linear_num_key_heads", int),
        num_value_heads=fields.get("linear_num_value_heads", int),
        key_head_dim=fields.get("linear_key_head_dim", int),
        value_head_dim=fields.get("linear_value_head_dim", int),
        conv_kernel_dim=fields.get("linear_conv_kernel_dim", int),
        layers=linear,
    )


_ROPE_KEYS = ("rope_theta", "partial_rotary_factor")

ONLY_SUPPORTED: dict[str, Any] = {
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "use_sliding_window": False,
    "quantization_config": None,
}
"""Fields that change the result and are supported at one value; leaving them out means that value."""

LAYER_TYPES: dict[Family, set[str]] = {
    "qwen3": {"full_attention"},
    "qwen3_moe": {"full_attention"},
    "qwen3_next": {"full_attention", "linear_attention"},
}

HARMLESS = frozenset(
    """
    architectures auto_map bos_token_id eos_token_id pad_token_id dtype torch_dtype transformers_version
    use_cache initializer_range max_window_layers sliding_window full_attention_interval layer_types
    rope_theta rope_scaling rope_parameters partial_rotary_factor output_router_logits router_aux_loss_coef
    _name_or_path output_attentions output_hidden_states return_dict id2label label2id problem_type
    chunk_size_feed_forward is_encoder_decoder
    """.split()  # noqa: SIM905
)
"""Fields that do not change the result, or that are read only where they do."""


def _refuse_unsupported(fields: _Fields, family: Family) -> None:
    for name, expected in ONLY_SUPPORTED.items():
        if (found := fields.raw.get(name, expected)) != expected:
            raise ConfigError(f"{fields.where}: {name}: only {expected!r} is supported, found {found!r}")
    if odd := sorted(set(fields.raw.get("layer_types") or ()) - LAYER_TYPES[family]):
        raise ConfigError(f"{fields.where}: layer_types: {odd} not supported in a {family} model")


@dataclass(frozen=True)
class _Fields:
    """A config.json's fields: errors say where, and what nobody asked for is known."""

    raw: Mapping[str, Any]
    where: str
    read: set[str] = field(default_factory=set)

    def get(self, name: str, kind: type) -> Any:
        self.read.add(name)
        if name not in self.raw:
            raise ConfigError(f"{self.where}: missing field {name!r}")
        value = self.raw[name]
        if kind is float and type(value) is int:
            return float(value)
        if type(value) is not kind:
            raise ConfigError(f"{self.where}: {name}: expected {kind.__name__}, found {value!r}")
        if kind is int and value <= 0:
            raise ConfigError(f"{self.where}: {name}: expected a positive number, found {value}")
        return value

    def warn_of_unread(self) -> None:
        unread = sorted(set(self.raw) - self.read - HARMLESS - ONLY_SUPPORTED.keys())
        if unread:
            warnings.warn(f"{self.where}: unknown fields are ignored: {', '.join(unread)}", stacklevel=3)
