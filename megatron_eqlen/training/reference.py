"""Reference model: a second set of weights, swapped into the policy's model for a forward pass."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch


class ReferenceWeights:
    """Frozen copy of a model's current weights, in host memory (pinned with CUDA)."""

    def __init__(self, chunks: Sequence[torch.nn.Module]) -> None:
        self._params = [param for chunk in chunks for param in chunk.parameters()]
        self._copies = [_host_copy(param) for param in self._params]

    @contextlib.contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Let the model compute with the reference weights in the block; then restore the policy's bit for
        bit."""
        policy = [_host_copy(param) for param in self._params]
        _write(self._params, self._copies)
        try:
            yield
        finally:
            _write(self._params, policy)


def _host_copy(param: torch.Tensor) -> torch.Tensor:
    copy = torch.empty(param.shape, dtype=param.dtype, pin_memory=param.is_cuda)
    return copy.copy_(param.detach())


@torch.no_grad()
def _write(params: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    for param, value in zip(params, values, strict=True):
        param.copy_(value)
