"""Rotary embeddings of a config.json: ``rope_scaling`` of old files, ``rope_parameters`` of new files.

Transformers computes scaled frequencies when a model is built (``models.config.scaled_rope``). Files whose
missing values Transformers guesses, or which vLLM reads differently, are refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron_eqlen.hf.config_fields import ConfigError, Fields

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


@dataclass(frozen=True)
class Rope:
    theta: float
    partial_rotary_factor: float
    scaling: Scaling


def read_rope(fields: Fields, partial: bool) -> Rope:
    """Return the rotary embeddings of a file; ``partial``: the family rotates a part of each head."""
    rope = _rope_dict(fields)
    theta = _agreed(fields, rope, "rope_theta", float)
    if not theta:
        raise ConfigError(f"{fields.where}: missing field 'rope_theta' (or rope_parameters.rope_theta)")
    rotary = _agreed(fields, rope, "partial_rotary_factor", float)
    if not partial and rotary not in (None, 1.0):
        raise ConfigError(
            f"{fields.where}: partial_rotary_factor: this family rotates whole heads, found {rotary}"
        )
    if partial and rotary is None:
        raise ConfigError(f"{fields.where}: missing field 'partial_rotary_factor'")
    if rotary is not None and rotary > 1:
        raise ConfigError(f"{fields.where}: partial_rotary_factor: expected at most 1, found {rotary}")
    return Rope(theta, 1.0 if rotary is None else rotary, _scaling(fields, rope))


def _rope_dict(fields: Fields) -> Fields:
    """Return the dict with the rotary parameters; empty if there is none."""
    sections = {key: fields.optional(key, dict, {}) for key in ("rope_scaling", "rope_parameters")}
    if all(sections.values()) and sections["rope_scaling"] != sections["rope_parameters"]:
        raise ConfigError(
            f"{fields.where}: rope_scaling beside rope_parameters: Transformers would read the first alone; "
            "merge it into rope_parameters"
        )
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
    inner = rope.optional(key, kind, outer)
    if outer is not None and outer != inner:
        name = rope.where.removeprefix(f"{fields.where}: ")
        raise ConfigError(f"{fields.where}: {key} is {outer} but {name}.{key} is {inner}")
    return inner


def _scaling(fields: Fields, rope: Fields) -> Scaling:
    kind = _kind(rope)
    length = {"original_max_position_embeddings"} if _REQUIRED[kind] else set()
    numbers = _REQUIRED[kind] | _OPTIONAL.get(kind, set())
    allowed = _ALWAYS | numbers | length | ({"truncate"} if kind == "yarn" else set())
    if odd := sorted(rope.raw.keys() - allowed):
        raise ConfigError(f"{rope.where}: {odd} not supported with rope_type {kind!r}")
    if kind == "default":
        return ()
    values = {key: rope.get(key, float) for key in sorted(_REQUIRED[kind])}
    if values["factor"] < 1:
        raise ConfigError(f"{rope.where}: factor: expected at least 1, found {values['factor']}")
    values["original_max_position_embeddings"] = rope.get("original_max_position_embeddings", int)
    _agreed(fields, rope, "original_max_position_embeddings", int)  # Transformers prefers the outer value
    values |= {key: rope.optional(key, float, None) for key in sorted(numbers & rope.raw.keys())}
    for key in {"beta_fast", "beta_slow"} & rope.raw.keys():
        if not values[key]:  # Transformers takes its default, vLLM 0
            raise ConfigError(f"{rope.where}: {key}: expected more than 0, found {values[key]}")
    if "truncate" in rope.raw:
        values["truncate"] = rope.get("truncate", bool)
    return (("rope_type", kind), *values.items())
