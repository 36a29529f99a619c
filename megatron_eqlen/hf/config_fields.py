"""Fields of a config.json: checked access without default values, supported families, refused values, and
rotary embeddings: ``rope_scaling`` of old files, ``rope_parameters`` of new files.

Transformers computes scaled frequencies when a model is built (``models.config.scaled_rope``). Files are
refused whose missing values Transformers guesses, or which vLLM reads differently.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal


class ConfigError(ValueError):
    """config.json that cannot be built here; the message names the file and the field."""


@dataclass(frozen=True)
class Fields:
    """Fields of a config.json. Errors name the file."""

    raw: Mapping[str, Any]
    where: str

    def get(self, name: str, kind: type, least: int = 1) -> Any:
        """Return a required field. ``least``: of integers."""
        if name not in self.raw:
            raise self.error(f"missing field {name!r}")
        return self._checked(name, kind, least)

    def error(self, text: str) -> ConfigError:
        """Return the error that the file is wrong in the way of ``text``."""
        return ConfigError(f"{self.where}: {text}")

    def get_or_null(self, name: str, kind: type, null: Any) -> Any:
        """Return a required field that may be null, which means ``null``."""
        return null if name in self.raw and self.raw[name] is None else self.get(name, kind)

    def optional(self, name: str, kind: type, default: Any) -> Any:
        """Return a field, or ``default`` if it is missing or null."""
        return default if self.raw.get(name) is None else self._checked(name, kind)

    def _checked(self, name: str, kind: type, least: int = 1) -> Any:
        value = self.raw[name]
        # ``type``, since True is an int for ``isinstance``; a float may be written as 1.
        if type(value) is not kind and not (kind is float and type(value) is int):
            raise self.error(f"{name}: expected {kind.__name__}, found {value!r}")
        if kind is int and not least <= value < 1 << 63:
            expected = "a positive number" if least else "a number from 0"
            raise self.error(f"{name}: expected {expected}, found {value}")
        if kind is float and not 0 <= value <= sys.float_info.max:
            raise self.error(f"{name}: expected a finite number from 0, found {value}")
        return kind(value)

    def one_of(self, name: str, other: str, kind: type) -> Any:
        """Return a field with two names, of which at least one must be present."""
        values = [self.get(key, kind) for key in (name, other) if key in self.raw]
        if not values:
            raise self.error(f"missing field {name!r} (or {other!r})")
        if values[0] != values[-1]:
            raise self.error(f"{name} is {values[0]} but {other} is {values[-1]}")
        return values[0]


@dataclass(frozen=True)
class Family:
    """Properties of a model family that its files do not state."""

    qkv_bias: bool = False
    """True: the query, key and value projections have biases."""
    qk_norm: bool = True
    """True: queries and keys are normalised."""
    head_dim: Literal["given", "optional", "computed"] = "given"
    """"optional": without ``head_dim``, heads divide ``hidden_size``; "computed": always, as vLLM does."""
    experts: bool = False
    """True: some feed-forward layers are experts."""
    shared_expert: bool = False
    """True: layers of experts have a gated shared expert."""
    hybrid: bool = False
    """True: Gated DeltaNet layers, output gates, partly rotated heads, and norms centred on zero."""
    separate_projections: bool = False
    """True: Gated DeltaNet's input projections are four tensors, not two interleaved by key head."""
    only_experts: bool = False
    """True: every feed-forward layer has experts, whose weights for a token sum to 1."""
    glm: bool = False
    """True: attention rotates a part of each head, with biases and norms by the file's choice; experts, after
    ``first_k_dense_replace`` dense layers, are scored by sigmoids and chosen with an untrained bias; shared
    experts have no gate; the layer after the last predicts further tokens."""

    @property
    def layer_types(self) -> set[str]:
        return {"full_attention", "linear_attention"} if self.hybrid else {"full_attention"}

    @property
    def only_supported(self) -> dict[str, Any]:
        """Fields that change the result and must have one value, which a missing field means."""
        if self.glm:
            return ONLY_SUPPORTED | ONLY_GLM
        values = ONLY_SUPPORTED | {"attention_bias": self.qkv_bias, "attn_output_gate": self.hybrid}
        return values | (ONLY_EXPERTS if self.only_experts else {})


FAMILIES: dict[str, Family] = {
    "llama": Family(qk_norm=False, head_dim="optional"),
    "qwen2": Family(qk_norm=False, head_dim="computed", qkv_bias=True),
    "qwen3": Family(),
    "qwen3_moe": Family(head_dim="optional", experts=True),
    "qwen3_next": Family(experts=True, shared_expert=True, hybrid=True),
    "qwen3_5_text": Family(hybrid=True, separate_projections=True),
    "qwen3_5_moe_text": Family(
        experts=True, shared_expert=True, hybrid=True, separate_projections=True, only_experts=True
    ),
    "glm4_moe": Family(head_dim="optional", experts=True, shared_expert=True, glm=True),
}
"""Supported families by ``model_type``."""

OF_IMAGES = {"qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text"}
"""``model_type`` of models of texts and images -> of the text model in their ``text_config``."""

ONLY_EXPERTS = {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
"""Values that ``Family.only_experts`` stands for."""

ONLY_GLM = {"norm_topk_prob": True, "n_group": 1, "topk_group": 1}

ONLY_SUPPORTED: dict[str, Any] = {
    "hidden_act": "silu",
    "attention_dropout": 0.0,
    "output_gate_type": "swish",
    "pretraining_tp": 1,
    "is_causal": True,
    **dict.fromkeys(("use_sliding_window", "mlp_bias", "rope_interleaved", "use_mrope"), False),
    **dict.fromkeys(("quantization_config", "compression_config", "dual_chunk_attention_config"), None),
}

ONLY_VLLM: dict[str, dict[str, Any]] = {
    "llama": {"sliding_window": None, "logit_scale": 1.0, "bias": False, "qkv_bias": False},
    "qwen2": {"qk_norm": False},
    "glm4_moe": {"sliding_window": None},
    **{name: {"qkv_bias": False, "layer_scale": False} for name, family in FAMILIES.items() if family.hybrid},
}
"""By family, fields that vLLM alone reads."""


def refuse_unsupported(fields: Fields, family: str, layers: int) -> None:
    """Raise ConfigError for a field at a value that is not supported in the family."""
    for name, expected in (FAMILIES[family].only_supported | ONLY_VLLM.get(family, {})).items():
        if (value := fields.raw.get(name, expected)) != expected:
            raise fields.error(f"{name}: only {expected!r} is supported in a {family} model, found {value!r}")
    if (kinds := fields.optional("layer_types", list, None)) is None:
        return
    supported = FAMILIES[family].layer_types
    # Lists may hold anything: only text can be looked up in a set.
    if odd := [kind for kind in kinds if not isinstance(kind, str) or kind not in supported]:
        found = f"{odd[0]!r} is not supported in a {family} model"
        raise fields.error(f"layer_types: {found}, expected {' or '.join(sorted(supported))}")
    if len(kinds) != layers:
        raise fields.error(f"layer_types: expected num_hidden_layers {layers} entries, found {len(kinds)}")


_ALWAYS = {"rope_type", "type", "rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved"}
"""Keys that a file may have with each kind. The last two place images; in texts they change nothing."""
_REQUIRED = {
    "default": set(),
    "yarn": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor"},
}
"""Numbers that a file must have beside ``original_max_position_embeddings``, by supported ``rope_type``."""
_OPTIONAL = {"yarn": {"attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"}}
"""Numbers that it may have; Transformers' defaults apply."""

Scaling = tuple[tuple[str, Any], ...]
"""``rope_type`` and its parameters, as (key, value); empty if frequencies are not scaled."""


def read_rope(fields: Fields, partial: bool) -> dict[str, Any]:
    """Return a ``ModelConfig``'s rotary fields; ``partial``: the family rotates a part of each head."""
    rope = _rope_dict(fields)
    theta = _agreed(fields, rope, "rope_theta", float)
    if not theta:
        raise fields.error("missing field 'rope_theta' (or rope_parameters.rope_theta)")
    rotary = _agreed(fields, rope, "partial_rotary_factor", float)
    if not partial and rotary not in (None, 1.0):
        raise fields.error(f"partial_rotary_factor: this family rotates whole heads, found {rotary}")
    if partial and rotary is None:
        raise fields.error("missing field 'partial_rotary_factor'")
    if rotary is not None and rotary > 1:
        raise fields.error(f"partial_rotary_factor: expected at most 1, found {rotary}")
    factor = 1.0 if rotary is None else rotary
    return {"rope_theta": theta, "partial_rotary_factor": factor, "rope_scaling": _scaling(fields, rope)}


def _rope_dict(fields: Fields) -> Fields:
    """Return the dict with the rotary parameters; empty if there is none."""
    sections = {key: fields.optional(key, dict, {}) for key in ("rope_scaling", "rope_parameters")}
    if all(sections.values()) and sections["rope_scaling"] != sections["rope_parameters"]:
        remedy = "Transformers would read the first alone; merge it into rope_parameters"
        raise fields.error(f"rope_scaling beside rope_parameters: {remedy}")
    name = "rope_scaling" if sections["rope_scaling"] else "rope_parameters"
    rope = Fields(sections[name], f"{fields.where}: {name}")
    kind = _kind(rope)
    if not isinstance(kind, str) or kind not in _REQUIRED:
        raise ConfigError(f"{rope.where}.rope_type: expected one of {', '.join(_REQUIRED)}, found {kind!r}")
    return rope


def _kind(rope: Fields) -> Any:
    return rope.raw.get("rope_type", rope.raw.get("type", "default"))


def _agreed(fields: Fields, rope: Fields, key: str, kind: type) -> Any:
    """Return a value that a file may give in two places, which must agree."""
    outer = fields.optional(key, kind, None)
    # Missing inside, the outer value counts; missing outside, the inner one.
    inner = rope.optional(key, kind, outer)
    if outer is not None and outer != inner:
        name = rope.where.removeprefix(f"{fields.where}: ")
        raise fields.error(f"{key} is {outer} but {name}.{key} is {inner}")
    return inner


def _scaling(fields: Fields, rope: Fields) -> Scaling:
    kind = _kind(rope)
    length = {"original_max_position_embeddings"} if _REQUIRED[kind] else set()
    numbers = _REQUIRED[kind] | _OPTIONAL.get(kind, set())
    # A key that is not known could change the frequencies unnoticed.
    allowed = _ALWAYS | numbers | length | ({"truncate"} if kind == "yarn" else set())
    if odd := sorted(rope.raw.keys() - allowed):
        raise rope.error(f"{odd} not supported with rope_type {kind!r}")
    if kind == "default":
        return ()
    values = {key: rope.get(key, float) for key in sorted(_REQUIRED[kind])}
    if values["factor"] < 1:
        raise rope.error(f"factor: expected at least 1, found {values['factor']}")
    values["original_max_position_embeddings"] = rope.get("original_max_position_embeddings", int)
    _agreed(fields, rope, "original_max_position_embeddings", int)  # Transformers prefers the outer value
    values |= {key: rope.optional(key, float, None) for key in sorted(numbers & rope.raw.keys())}
    for key in {"beta_fast", "beta_slow"} & rope.raw.keys():
        if not values[key]:  # Transformers takes its default, vLLM 0
            raise rope.error(f"{key}: expected more than 0, found {values[key]}")
    if "truncate" in rope.raw:
        values["truncate"] = rope.get("truncate", bool)
    return (("rope_type", kind), *values.items())
