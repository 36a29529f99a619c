"""Rotary embeddings of a config.json: ``rope_scaling`` of old files, ``rope_parameters`` of new files.

Rules and defaults are those of Transformers 5 (``modeling_rope_utils.py``). Files whose missing values
Transformers guesses, or which vLLM reads differently, are refused.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from megatron_eqlen.hf.config_fields import ConfigError, Fields

_ALWAYS = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
_YARN = {
    "factor",
    "original_max_position_embeddings",
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
    "truncate",
}


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
class Rope:
    theta: float
    partial_rotary_factor: float
    yarn: Yarn | None


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
    return Rope(theta, 1.0 if rotary is None else rotary, _yarn(fields, rope))


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
    kind = rope.raw.get("rope_type", rope.raw.get("type", "default"))
    if kind not in ("default", "yarn"):
        raise ConfigError(f"{rope.where}.rope_type: expected 'default' or 'yarn', found {kind!r}")
    known = _ALWAYS | _YARN if kind == "yarn" else _ALWAYS
    if odd := sorted(rope.raw.keys() - known):
        raise ConfigError(f"{rope.where}: {odd} not supported with rope_type {kind!r}")
    return rope


def _agreed(fields: Fields, rope: Fields, key: str, kind: type) -> Any:
    """Return a value that a file may give in two places, which must agree."""
    outer = fields.optional(key, kind, None)
    inner = rope.optional(key, kind, outer)
    if outer is not None and outer != inner:
        name = rope.where.removeprefix(f"{fields.where}: ")
        raise ConfigError(f"{fields.where}: {key} is {outer} but {name}.{key} is {inner}")
    return inner


def _yarn(fields: Fields, rope: Fields) -> Yarn | None:
    if rope.raw.get("rope_type", rope.raw.get("type")) != "yarn":
        return None
    factor = rope.get("factor", float)
    if factor < 1:
        raise ConfigError(f"{rope.where}: factor: expected at least 1, found {factor}")
    original = rope.get("original_max_position_embeddings", int)
    _agreed(fields, rope, "original_max_position_embeddings", int)  # Transformers prefers the outer value
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
