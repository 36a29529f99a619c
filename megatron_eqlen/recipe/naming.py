"""Dotted keys, differences between recipes, and the name of a run's folder, which is derived from them."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection
from typing import Any

MAY_CHANGE = (
    "steps", "gpu_hours", "generated_tokens", "flops", "cluster", "parallel", "checkpoint", "report",
    "profile", "evaluation", "run_dir", "variant", "inputs_from", "rollout.servers", "reward.on_error",
    "reward.max_unscored", "rollout.sync", "rollout.park_trainer", "rollout.mismatch", "optimizer.offload",
)  # fmt: skip
"""Keys that may change when a run resumes: where and how it runs, not what it computes, and keys that may
have ended it (``rollout.mismatch``, ``reward.on_error``). Others would mix two experiments."""
NAMED_ELSEWHERE = ("name", "seed", "objective", "sampling")
"""Keys that the path of the run folder always contains."""
ABLATIONS = ("equal_length.prefix_in_gradient", "equal_length.suffix_reward", "equal_length.pair_weight")
"""Keys that ``Recipe.method`` names, for equal-length sampling."""
LONGEST = 100
"""Maximum length of a variant's name; longer names are cut and get a hash."""


def is_under(key: str, names: tuple[str, ...]) -> bool:
    """Return True if ``key`` is one of ``names`` or inside a section of that name."""
    return any(key == name or key.startswith(f"{name}.") for name in names)


def leaves(plain: Any, at: str = "") -> dict[str, Any]:
    """Return every value of plain data by its dotted key: ``{"data.sources.0.path": "x"}``."""
    if not isinstance(plain, dict | list | tuple) or not plain:
        # An empty section or list is a value.
        return {at: plain}
    items = plain.items() if isinstance(plain, dict) else enumerate(plain)
    flat: dict[str, Any] = {}
    for key, value in items:
        flat |= leaves(value, f"{at}.{key}" if at else str(key))
    return flat


def flat(tree: dict[str, Any], whole: Collection[str] = (), at: str = "") -> dict[str, Any]:
    """Return values and lists by their dotted keys; sections in ``whole`` are values."""
    keys: dict[str, Any] = {}
    for key, value in tree.items():
        is_section = isinstance(value, dict) and value and f"{at}{key}" not in whole
        keys |= flat(value, whole, f"{at}{key}.") if is_section else {f"{at}{key}": value}
    return keys


def nested(keys: dict[str, Any]) -> dict[str, Any]:
    """Return the sections of dotted keys."""
    tree: dict[str, Any] = {}
    for key, value in keys.items():
        *parents, last = key.split(".")
        at = tree
        for part in parents:
            at = at.setdefault(part, {})
        at[last] = value
    return tree


def differences(before: Any, after: Any) -> dict[str, tuple[Any, Any]]:
    """Return ``{"loss.kl_coef": (old, new)}`` for keys whose values differ; None: a missing value."""
    old, new = leaves(before), leaves(after)
    # an empty section or list that has got items: they alone differ
    old = {key: value for key, value in old.items() if key in new or value not in ({}, [])}
    return {key: (old.get(key), new.get(key)) for key in old | new if old.get(key) != new.get(key)}


def variant_name(variant: dict[str, str]) -> str:
    """Return a name like ``group_size=8,loss.kl_coef=0``; different variants have different names."""
    text = ",".join(f"{key}={value}" for key, value in sorted(variant.items()))
    safe = re.sub(r"[^\w.=,+-]", "_", text)[:LONGEST]
    # a comma or an equals sign in a value could make two variants alike
    plain = safe == text and not any(re.search("[,=]", value) for value in variant.values())
    digest = hashlib.sha256(json.dumps(variant, sort_keys=True).encode()).hexdigest()[:8]
    return safe if plain else f"{safe}-{digest}"
