"""Formats of numbers, on the terminal and on the page."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

REWARD = ("policy/reward", "reward/mean", "objective/reward_mean")
PAIRS = ("harvest/pairs_per_stream", "objective/pairs_per_stream")
RESPONSE_LENGTH = ("policy/response_length", "harvest/ended_response_length", "harvest/response_length")
MISMATCH = ("mismatch/kl",)
ROLLOUT_SPEED = ("harvest/tokens_per_second",)
TRAINING_SPEED = ("train/tokens_per_second",)
SHOWN = {
    "reward": (REWARD, ""),
    "loss": (("loss/nll",), ""),
    "pairs/stream": (PAIRS, ""),
    "length": (RESPONSE_LENGTH, ""),
    "mismatch KL": (MISMATCH, ""),
    "rollout": (ROLLOUT_SPEED, " tok/s"),
    "train": (TRAINING_SPEED, " tok/s"),
}
"""Label -> (names of the metric, unit), in the order shown; metrics that a run does not have are left out."""
SCALES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
MOST_TEXT = 1500
"""Most characters of a segment on a page."""

Rows = Sequence[dict[str, Any]]


def first_of(metrics: Mapping[str, float | None], names: tuple[str, ...]) -> float | None:
    """Return the first of ``names`` that was measured, None if none was."""
    return next((metrics[name] for name in names if name in metrics), None)


def compact(value: float | None) -> str:
    """Format to about three digits: ``0.512``, ``96.3``, ``14.2k``, ``1.3e-06``; ``–`` for None."""
    if value is None or not math.isfinite(value):
        return "–" if value is None else str(value)
    size = abs(value)
    if size >= 1e4:
        scale, unit = next(pair for pair in SCALES if size >= pair[0])
        return f"{value / scale:.3g}{unit}"
    if 0 < size < 1e-3:
        return f"{value:.1e}"
    if float(value).is_integer() or size >= 100:
        return f"{value:.0f}"
    return f"{value:.1f}" if size >= 10 else f"{value:.3f}" if size < 1 else f"{value:.2f}"


def duration(seconds: float) -> str:
    """Format a duration: ``9 s``, ``1:32``, ``2:05:00``."""
    total = round(seconds)
    if total < 60:
        return f"{total} s"
    minutes, rest = divmod(total, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def shorten(text: str) -> str:
    """Return ``text``, or its beginning and end if it is too long for a page."""
    if len(text) <= MOST_TEXT:
        return text
    half = MOST_TEXT // 2
    return f"{text[:half]} […{len(text) - 2 * half} characters…] {text[-half:]}"


def markdown_rows(rows: Rows) -> str:
    """Format rows as a GitHub table."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    lines = [[*map(_cell, names)], *([_cell(row.get(name)) for name in names] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join(
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |"
        for line in lines
    )


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    text = compact(value) if value is None or isinstance(value, float) else str(value)
    # A key's text, which names a method, may have lines and bars of its own.
    return " ".join(text.split()).replace("|", r"\|")
