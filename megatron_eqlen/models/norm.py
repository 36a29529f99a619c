"""RMSNorm of the layers in plain torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer import TransformerConfig

CPU_ELEMENTS = 1 << 17
"""Numbers that a CPU's cache holds in float32, with what is made of them."""


class RMSNorm(torch.nn.Module):
    """``x / rms(x) * weight``, or ``* (1 + weight)`` if zero-centred (default: as the configuration has it),
    over the last dimension of ``hidden_size``; computed in at least float32."""

    def __init__(
        self,
        config: TransformerConfig,
        hidden_size: int,
        eps: float = 1e-6,
        zero_centered: bool | None = None,
    ) -> None:
        super().__init__()
        self.eps = eps
        self.zero_centered = config.layernorm_zero_centered_gamma if zero_centered is None else zero_centered
        initial = torch.zeros if self.zero_centered else torch.ones
        self.weight = torch.nn.Parameter(initial(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # pyright: ignore[reportAttributeAccessIssue]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        weight = self.weight.to(wide) + 1 if self.zero_centered else self.weight.to(wide)
        if x.is_cpu and x.dtype == torch.bfloat16:
            return _BlockedNorm.apply(x, weight, self.eps)
        return (F.rms_norm(x.to(wide), x.shape[-1:], None, self.eps) * weight).to(x.dtype)


class _BlockedNorm(torch.autograd.Function):
    """RMSNorm of bfloat16 on a CPU, in float32 for as many rows as its cache holds. Keeps its input alone."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        out = torch.empty(x.shape, dtype=x.dtype)
        for some, of in zip(_blocks(x), _blocks(out), strict=True):
            of.copy_(F.rms_norm(some.float(), x.shape[-1:], None, eps) * weight)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight = ctx.saved_tensors
        by_x, by_weight = torch.empty(x.shape, dtype=x.dtype), torch.zeros_like(weight)
        for some, up, of in zip(*map(_blocks, (x, grad, by_x)), strict=True):
            # n = x scale, y = n w: with u = dL/dy w, dL/dx = (u - n mean(u n)) scale, and dL/dw sums dL/dy n
            some, up = some.float(), up.float()
            scale = torch.rsqrt(some.square().mean(-1, keepdim=True) + ctx.eps)
            normed = some * scale
            if ctx.needs_input_grad[1]:
                by_weight += (up * normed).flatten(end_dim=-2).sum(0)
            up = up * weight
            of.copy_((up - normed * (up * normed).mean(-1, keepdim=True)) * scale)
        return by_x, by_weight if ctx.needs_input_grad[1] else None, None


def _blocks(x: torch.Tensor) -> Sequence[torch.Tensor]:
    return x.split(max(1, CPU_ELEMENTS * len(x) // max(1, x.numel())))
