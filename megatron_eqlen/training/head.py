"""LM head and its log-probs. For rows of any length, only a chunk of the logits exists at once.

A row of up to ``packing.logits_chunk`` supervised tokens goes through Megatron's linear layer, and its logits
are kept for the backward pass, which recomputes those of a longer row, chunk by chunk of nearly equal length.

Chunks change no bit of log-probs and of hidden states' gradients, as far as the matrix product treats rows
alike whatever their number (MKL does from 16 rows on; cuBLAS may not). The weight's gradient is a sum, which
they add up in another order: into ``main_grad``, as if each were a micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.layers import (
    linear_with_frozen_weight,
    linear_with_grad_accumulation_and_async_allreduce,
)
from torch import Tensor

from megatron_eqlen.processes.distributed import device
from megatron_eqlen.tokens import Ragged
from megatron_eqlen.training.logprobs import masked_token_logprobs, token_logprobs
from megatron_eqlen.types import Row

UNIT = 8
"""Chunks begin at multiples of this, like the blocks of matrix-product kernels."""


@dataclass(frozen=True)
class Head:
    """LM head: computes log-probs from the hidden states of a row's supervised tokens."""

    labels: Tensor
    """[n] int64"""
    mask: tuple[Tensor, Tensor, Tensor | None] | None
    """Tokens that sampling kept: ids, counts and log-probs, as for ``masked_token_logprobs``."""
    mask_ends: np.ndarray | None
    """[n + 1] int64: start of each token's ids in the mask, and the end of the last one's."""
    temperature: float
    group: dist.ProcessGroup
    """The tensor-parallel group."""
    chunk: int
    """Most tokens whose logits exist at once: a multiple of UNIT, or at least the row's tokens."""

    @classmethod
    def of(cls, row: Row, at: np.ndarray, temperature: float, group: dist.ProcessGroup, chunk: int) -> Head:
        """Make the head of a row. ``at`` [n] int64: all or some of its supervised positions."""
        labels = torch.from_numpy(row.labels[at]).to(device())
        if (kept := row.columns.get("kept")) is None:
            return cls(labels, None, None, temperature, group, chunk)
        assert isinstance(kept, Ragged)
        # [supervised positions] bool, and the same for each id of their masks
        chosen = np.isin(np.flatnonzero(row.weights > 0), at)
        inside, counts = chosen.repeat(kept.counts), kept.counts[chosen]
        ids, lengths = (torch.from_numpy(each).to(device()) for each in (kept.values[inside], counts))
        logprobs = None
        if (sampled := row.columns.get("kept_logprobs")) is not None:
            assert isinstance(sampled, Ragged)
            logprobs = torch.from_numpy(sampled.values[inside]).to(device())
        mask = (ids, lengths, logprobs)
        return cls(labels, mask, np.append(0, np.cumsum(counts)), temperature, group, chunk)

    def __call__(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """Return log-probs and entropy, [2, n], of the distribution that is trained. hidden [n, h], the same
        on every tensor-parallel rank; weight [V / TP, h]. The entropy has no gradient."""
        if len(hidden) > self.chunk:
            return _ChunkedHead.apply(hidden, weight, self)
        parallel = self.group.size() > 1
        linear = linear_with_grad_accumulation_and_async_allreduce
        if not weight.requires_grad:
            linear = linear_with_frozen_weight
        # no bias, no fused gradient; each rank's part of the vocabulary adds to the gradient of `hidden`
        logits = linear(hidden, weight, None, False, parallel, False, tp_group=self.group)
        return torch.stack(self.logprobs(logits, slice(0, len(hidden))))

    def logprobs(self, logits: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        """Return ([m], [m]): log-probs and entropy of the tokens ``rows``, whose logits are [m, V / TP]."""
        labels = self.labels[rows]
        if self.mask is None or self.mask_ends is None:
            return token_logprobs(logits, labels, self.temperature, self.group)
        ids, counts, sampled = self.mask
        kept = slice(self.mask_ends[rows.start], self.mask_ends[rows.stop])
        of_kept = None if sampled is None else sampled[kept]
        return masked_token_logprobs(
            logits, labels, ids[kept], counts[rows], self.temperature, self.group, of_kept
        )

    def chunks(self) -> list[slice]:
        """Return slices of all tokens: as few as ``chunk`` allows, of nearly equal length."""
        tokens = len(self.labels)
        units, count = -(-tokens // UNIT), -(-tokens // self.chunk)
        ends = [min(units * i // count * UNIT, tokens) for i in range(count + 1)]
        return [slice(start, end) for start, end in pairwise(ends)]


class _ChunkedHead(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, head: Head) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        ctx.head, ctx.main_grad = head, getattr(weight, "main_grad", None)
        # [m, V / TP] logits of a chunk are freed before the next chunk's
        parts = [torch.stack(head.logprobs(hidden[rows] @ weight.t(), rows)) for rows in head.chunks()]
        return torch.cat(parts, dim=1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        hidden, weight = ctx.saved_tensors
        total = ctx.main_grad
        trained = ctx.needs_input_grad[1]
        if trained and total is None:  # not in Megatron's DDP
            total = torch.zeros_like(weight, dtype=torch.promote_types(weight.dtype, torch.float32))
        grad_hidden = torch.empty_like(hidden)
        for rows in ctx.head.chunks():
            grad_logits = _grad_logits(ctx.head, hidden[rows] @ weight.t(), rows, grad[0, rows])
            torch.matmul(grad_logits, weight, out=grad_hidden[rows])
            if trained:
                total.add_(grad_logits.t() @ hidden[rows])
            del grad_logits
        # each rank has the gradient through its part of the vocabulary
        if ctx.head.group.size() > 1:
            dist.all_reduce(grad_hidden, group=ctx.head.group)
        if not trained:
            return grad_hidden, None, None
        if ctx.main_grad is None:
            return grad_hidden, total.to(weight.dtype), None
        # DDP waits for this gradient and adds it to main_grad, so a zero suffices
        return grad_hidden, weight.new_zeros(()).expand_as(weight), None


def _grad_logits(head: Head, logits: Tensor, rows: slice, grad: Tensor) -> Tensor:
    with torch.enable_grad():
        logprobs, _ = head.logprobs(logits.requires_grad_(), rows)
    return torch.autograd.grad(logprobs, logits, grad)[0]
