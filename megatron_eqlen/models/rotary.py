"""YaRN in Megatron-Core, whose own class rotates entire heads and has no ``attention_factor``."""

from __future__ import annotations

import math

import torch
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from megatron_eqlen.hf.rope import Yarn


def yarn_frequencies(yarn: Yarn, theta: float, dim: int) -> Tensor:
    """Return the angles per position, [dim / 2] float32, of heads that are rotated in ``dim`` dimensions.

    They equal those of Transformers' ``_compute_yarn_parameters`` to the bit: at position 131,072 a different
    rounding of a frequency near 1 changes the angle by 0.01.
    """

    def dimension(turns: float) -> float:
        """Return the dimension with this number of turns within the original length (the paper's section
        3.2)."""
        length = yarn.original_max_position_embeddings
        return (dim * math.log(length / (turns * 2 * math.pi))) / (2 * math.log(theta))

    low, high = dimension(yarn.beta_fast), dimension(yarn.beta_slow)
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = (torch.arange(dim // 2, dtype=torch.float32) - low) / ((high - low) or 0.001)
    kept = 1 - ramp.clamp(0, 1)
    wavelengths = theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    return 1.0 / (yarn.factor * wavelengths) * (1 - kept) + 1.0 / wavelengths * kept


def set_attention_factor(config: TransformerConfig, factor: float) -> None:
    """Make Megatron's attention multiply cosine and sine by ``factor``.

    Megatron reads three fields that ``TransformerConfig`` does not declare, and computes (0.1 ``mscale``
    ln(``scaling``) + 1) / (0.1 ``mscale_all_dim`` ln(``scaling``) + 1): with ln(scaling) = 10 that is
    ``mscale`` + 1 over 1.
    """
    fields = {"rotary_scaling_factor": math.exp(10), "mscale": factor - 1, "mscale_all_dim": 0.0}
    for name, value in fields.items():
        setattr(config, f"yarn_{name}", value)
