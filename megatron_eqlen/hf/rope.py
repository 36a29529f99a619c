"""Rotary embeddings of a config.json: ``rope_scaling`` of old files, ``rope_parameters`` of new files.

Rules and defaults are those of Transformers 5 (``modeling_rope_utils.py``). Files whose missing values
Transformers guesses, or which vLLM reads differently, are refused.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from megatron_eqlen.hf.config_fields import ConfigError, Fields

_ALWAYS = {"rope_type", "type", "rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved"}
"""The last two place images; in texts they change nothing."""
_LENGTHS = {"factor", "original_max_position_embeddings"}
KINDS: dict[str, set[str]] = {
    "default": _ALWAYS,
    "yarn": _ALWAYS
    | _LENGTHS
    | {"attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"},
    "llama3": _ALWAYS | _LENGTHS | {"low_freq_factor", "high_freq_factor"},
}
"""Supported values of ``rope_type``, and the keys that a file may have with each."""


@dataclass(frozen=True)
class Yarn:
    """Extended context by YaRN (Peng et al., arXiv 2309.00071); every option is filled in."""

    factor: float
    original_max_position_embeddings: int
    attention_factor: float
    """Factor of cosine and sine, for queries and for keys."""
    beta_fast: float = 32.0
    """Dimensions with more turns than this within the original length keep their frequency."""
    beta_slow: float = 1.0
    """Dimensions with fewer turns than this have their frequency divided by ``factor``."""
    truncate: bool = True
    """True: the range between both is rounded to whole dimensions."""

    @property
    def context_length(self) -> int:
        """Positions that the scaled frequencies are made for, and for which vLLM has a table."""
        return int(self.factor * self.original_max_position_embeddings)


@dataclass(frozen=True)
class Llama3:
    """Extended context of Llama 3.1: long wavelengths are stretched by ``factor``, short ones kept."""

    factor: float
    original_max_position_embeddings: int
    low_freq_factor: float
    """Dimensions with fewer turns than this within the original length are stretched."""
    high_freq_factor: float
    """Dimensions with more turns than this are kept; in between both are interpolated."""


@dataclass(frozen=True)
class Rope:
    theta: float
    partial_rotary_factor: float
    yarn: Yarn | None
    llama3: Llama3 | None


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
    return Rope(theta, 1.0 if rotary is None else rotary, _yarn(fields, rope), _llama3(fields, rope))


def _rope_dict(fields: Fields) -> Fields:
    """Return the dict with the rotary parameters; empty if there is none."""
    found = {key: fields.optional(key, dict, {}) for key in ("rope_scaling", "rope_parameters")}
    if all(found.values()) and found["rope_scaling"] != found["rope_parameters"]:
        raise ConfigError(
            f"{fields.where}: rope_scaling beside rope_parameters: Transformers would read the first alone; "
            "merge it into rope_parameters"
        )
    name = "rope_scaling" if found["rope_scaling"] else "rope_parameters"
    rope = Fields(found[name], f"{fields.where}: {name}")
    kind = _kind(rope)
    if not isinstance(kind, str) or kind not in KINDS:
        raise ConfigError(f"{rope.where}.rope_type: expected one of {', '.join(KINDS)}, found {kind!r}")
    if odd := sorted(rope.raw.keys() - KINDS[kind]):
        raise ConfigError(f"{rope.where}: {odd} not supported with rope_type {kind!r}")
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


def _llama3(fields: Fields, rope: Fields) -> Llama3 | None:
    if _kind(rope) != "llama3":
        return None
    factor, original = _lengths(fields, rope)
    low, high = (rope.get(key, float) for key in ("low_freq_factor", "high_freq_factor"))
    if not 0 < low < high:
        raise ConfigError(
            f"{rope.where}: low_freq_factor: expected more than 0 and less than high_freq_factor {high}, "
            f"found {low}"
        )
    return Llama3(factor, original, low, high)


def _lengths(fields: Fields, rope: Fields) -> tuple[float, int]:
    """Return ``factor`` and ``original_max_position_embeddings``."""
    factor = rope.get("factor", float)
    if factor < 1:
        raise ConfigError(f"{rope.where}: factor: expected at least 1, found {factor}")
    original = rope.get("original_max_position_embeddings", int)
    _agreed(fields, rope, "original_max_position_embeddings", int)  # Transformers prefers the outer value
    return factor, original


def _yarn(fields: Fields, rope: Fields) -> Yarn | None:
    if _kind(rope) != "yarn":
        return None
    factor, original = _lengths(fields, rope)
    betas = {key: rope.get(key, float) for key in ("beta_fast", "beta_slow") if key in rope.raw}
    if zero := [key for key, value in betas.items() if value == 0]:
        raise ConfigError(f"{rope.where}: {zero[0]}: expected more than 0, found 0")
    truncate = rope.get("truncate", bool) if "truncate" in rope.raw else True
    return Yarn(factor, original, _attention_factor(rope, factor), **betas, truncate=truncate)


def _attention_factor(rope: Fields, factor: float) -> float:
    """Return the attention factor by Transformers' rule: the file's value; or from ``mscale`` and
    ``mscale_all_dim``; or 0.1 ln(factor) + 1."""
    given = rope.optional("attention_factor", float, None)
    if given is not None:
        return given
    scale, scale_all = (rope.optional(key, float, 0.0) for key in ("mscale", "mscale_all_dim"))
    if not (scale and scale_all):
        scale, scale_all = 1.0, 0.0
    return (0.1 * scale * math.log(factor) + 1) / (0.1 * scale_all * math.log(factor) + 1)
