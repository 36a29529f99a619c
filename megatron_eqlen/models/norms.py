"""RMSNorm without Transformer Engine, with the interface of layer specs."""

import torch
import torch.nn.functional as F
from megatron.core.transformer import TransformerConfig


class RMSNorm(torch.nn.Module):
    """``x / rms(x) * weight``, or ``* (1 + weight)`` if zero-centred; computed in at least float32.

    Args:
        hidden_size: size of the last dimension, which is normalised.
        zero_centered: default: the configuration's ``layernorm_zero_centered_gamma``.
    """

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
        mark = config.sequence_parallel  # Megatron reads this mark of the parameter
        self.weight.sequence_parallel = mark  # pyright: ignore[reportAttributeAccessIssue]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        weight = self.weight.to(wide) + 1 if self.zero_centered else self.weight.to(wide)
        return (F.rms_norm(x.to(wide), x.shape[-1:], None, self.eps) * weight).to(x.dtype)
