"""Distribution of log-ratios as counts, which add up over rows and ranks, and its quantiles.

Bins grow by 2% from 1e-7 to 20 nats on both sides of 0, as in DDSketch (arXiv 1908.10693): the log of a
quantile is within 1% of the exact value.
"""

from __future__ import annotations

import math

import torch

SMALLEST, LARGEST = 1e-7, 20.0
"""Log-ratios below the first count as 0; log-ratios beyond the second are clamped to it."""
GROWTH = 1.02
LEVELS = math.ceil(math.log(LARGEST / SMALLEST) / math.log(GROWTH))
BINS = 2 * LEVELS + 1


def count(log_ratios: torch.Tensor) -> torch.Tensor:
    """Return [BINS] float64 counts, ascending, of [n] float64. Numbers that are not finite count as 0."""
    sizes = log_ratios.nan_to_num(0.0, 0.0, 0.0).abs().clamp(SMALLEST, LARGEST)
    levels = ((sizes / SMALLEST).log() / math.log(GROWTH)).ceil().clamp(0, LEVELS)
    bins = LEVELS + (levels * log_ratios.nan_to_num(0.0, 0.0, 0.0).sign()).long()
    return torch.bincount(bins, minlength=BINS).double()


def quantile(counts: torch.Tensor, share: float) -> float:
    """Return the smallest log-ratio that ``share`` of the counted log-ratios (at least one) do not exceed."""
    below = counts.cumsum(0)
    rank = max(1.0, math.ceil(share * below[-1].item()))
    level = int(torch.searchsorted(below, rank)) - LEVELS
    return 0.0 if level == 0 else math.copysign(SMALLEST * GROWTH ** (abs(level) - 0.5), level)
