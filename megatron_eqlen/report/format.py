"""How numbers look, on the terminal and on the page."""

from __future__ import annotations

import math
from collections.abc import Mapping

REWARD = ("reward/mean", "objective/reward_mean")
PAIRS = ("harvest/pairs_per_stream", "objective/pairs_per_stream")
RESPONSE_LENGTH = ("harvest/ended_response_length", "harvest/response_length")
MISMATCH_KL = ("loss/mismatch_kl",)
ROLLOUT_SPEED = ("harvest/tokens_per_second",)
TRAINING_SPEED = ("train/tokens_per_second",)
STAGES = ("harvest", "score", "trees", "train", "sync", "evaluate")
"""The stages of a step, each measured as ``time/NAME``; their sum is nearly ``time/step``."""


def first_of(metrics: Mapping[str, float], names: tuple[str, ...]) -> float | None:
    """The first of ``names`` that was measured, None if none was."""
    return next((metrics[name] for name in names if name in metrics), None)


def compact(value: float | None) -> str:
    """About three digits: ``0.512``, ``96.3``, ``14.2k``, ``1.3e-06``; ``–`` for nothing."""
    if value is None:
        return "–"
    size = abs(value)
    if not math.isfinite(value):
        return str(value)
    if size >= 1e4:
        return f"{value / 1e6:.3g}M" if size >= 1e6 else f"{value / 1e3:.3g}k"
    if 0 < size < 1e-3:
        return f"{value:.1e}"
    if float(value).is_integer() or size >= 100:
        return f"{value:.0f}"
    return f"{value:.1f}" if size >= 10 else f"{value:.3f}" if size < 1 else f"{value:.2f}"


def duration(seconds: float) -> str:
    """``9 s``, ``1:32``, ``2:05:00``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
