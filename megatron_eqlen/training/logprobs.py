"""Log-probs of labels and entropy from logits whose vocabulary is split over tensor-parallel ranks.

Two all-reduces in the forward pass, none in the backward pass. Nothing of the logits' size is stored but they
and their gradient: both passes cast a few tokens at a time, at most two tensors of BLOCK_ELEMENTS numbers (on
a CPU, of CPU_ELEMENTS). float32 accumulates logits of 16 and 32 bits; float64 stays float64.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

BLOCK_ELEMENTS = 1 << 25
"""Number of logits that are cast at once: two such tensors of float32 are 256 MiB."""
CPU_ELEMENTS = 1 << 18
"""The same on a CPU, whose cache then holds them."""


def token_logprobs(
    logits: Tensor, labels: Tensor, temperature: float = 1.0, group: dist.ProcessGroup | None = None
) -> tuple[Tensor, Tensor]:
    """Return the log-softmax of ``logits / temperature`` at ``labels``, and the entropy in nats: ([n], [n]).

    logits: [n, V / tp], this rank's slice of the vocabulary, in rank order. labels: [n] int64, the same on
    every rank. group: tensor parallel; None: the vocabulary is not split. The entropy has no gradient.
    """
    return _TokenLogprobs.apply(logits, labels, temperature, group)


def masked_token_logprobs(
    logits: Tensor,
    labels: Tensor,
    mask_ids: Tensor,
    mask_counts: Tensor,
    temperature: float = 1.0,
    group: dist.ProcessGroup | None = None,
    sampled: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """``token_logprobs`` of the distribution that was sampled from: normalised over the tokens that sampling
    kept instead of the vocabulary (DeepSeek-V3.2, section 3.1: keep the sampling mask).

    mask_ids: [m] int64, the kept tokens of the first row of ``logits``, then of the second, ... mask_counts:
    [n] int64, how many each row has; a row's label is one of its own. sampled: [m] float64, log-probs of kept
    tokens when they were sampled. The gradient by the logits is then 1 at the label less ``sampled``, not the
    policy, at all kept tokens: its mean over draws from it is 0 (score centering, arXiv 2609.20807).
    """
    row = torch.repeat_interleave(mask_counts)
    return _MaskedLogprobs.apply(logits, labels[row] == mask_ids, mask_ids, row, temperature, group, sampled)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, labels, temperature, group):
        local, mine = _local_columns(logits, labels, group)
        kind = torch.float64 if logits.dtype == torch.float64 else torch.float32
        # [n] largest logit over all ranks: no exponential overflows
        peak = logits.amax(-1).to(kind) / temperature
        _all_reduce(peak, dist.ReduceOp.MAX, group)
        sums = torch.zeros(3, len(logits), dtype=kind, device=logits.device)
        for rows in _blocks(logits):
            shifted = _scaled(logits[rows], kind, temperature).sub_(peak[rows, None])
            sums[:, rows] = _sums(shifted, local[rows], mine[rows])
            del shifted  # before the next block is cast
        _all_reduce(sums, dist.ReduceOp.SUM, group)
        # [n] each: Z = sum of e^shifted, sum of e^shifted x shifted, and the label's shifted logit
        total, weighted, label = sums
        log_total = total.log()
        entropy = log_total - weighted / total
        ctx.save_for_backward(logits, local, mine, peak + log_total)
        ctx.temperature = temperature
        ctx.mark_non_differentiable(entropy)
        return label - log_total, entropy

    @staticmethod
    def backward(ctx, grad, _entropy_grad):
        logits, local, mine, log_total = ctx.saved_tensors
        grad_logits = torch.empty_like(logits)
        # d log p(label) / d logits = (one-hot of the label - p) / temperature
        scale = (grad / ctx.temperature).to(log_total.dtype)
        for rows in _blocks(logits):
            log_p = _scaled(logits[rows], log_total.dtype, ctx.temperature)
            slope = log_p.sub_(log_total[rows, None]).exp_().mul_(-scale[rows, None])
            slope.scatter_add_(-1, local[rows, None], (scale[rows] * mine[rows])[:, None])
            grad_logits[rows] = slope  # cast on the way
            del log_p, slope
        return grad_logits, None, None, None


class _MaskedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, is_label, ids, rows, temperature, group, sampled):
        local, mine = _local_columns(logits, ids, group)
        kind = torch.float64 if logits.dtype == torch.float64 else torch.float32
        # [m] logits of the kept tokens; those of other ranks are -inf and add nothing
        values = (logits[rows, local].to(kind) / temperature).masked_fill(~mine, -torch.inf)
        # [n] largest of each row's kept logits, over all ranks
        peak = torch.full((len(logits),), -torch.inf, dtype=kind, device=logits.device)
        peak.scatter_reduce_(0, rows, values, "amax")
        _all_reduce(peak, dist.ReduceOp.MAX, group)
        shifted = values - peak[rows]
        weight = shifted.exp()
        # 0 x -inf would be NaN in the sums
        shifted = shifted.masked_fill(~mine, 0)
        terms = torch.stack((weight, weight * shifted, shifted * is_label))
        sums = torch.zeros(3, len(logits), dtype=kind, device=logits.device).index_add_(1, rows, terms)
        _all_reduce(sums, dist.ReduceOp.SUM, group)
        # [n] each, as without a mask
        total, weighted, label = sums
        log_total = total.log()
        entropy = log_total - weighted / total
        # [m] probability that the gradient takes off each kept token
        expected = weight / total[rows] if sampled is None else sampled.to(kind).exp() * mine
        ctx.save_for_backward(expected, is_label & mine, local, rows)
        ctx.temperature, ctx.shape, ctx.dtype = temperature, logits.shape, logits.dtype
        ctx.mark_non_differentiable(entropy)
        return label - log_total, entropy

    @staticmethod
    def backward(ctx, grad, _entropy_grad):
        expected, is_label, local, rows = ctx.saved_tensors
        slope = (is_label.to(expected.dtype) - expected) * (grad / ctx.temperature).to(expected.dtype)[rows]
        grad_logits = torch.zeros(ctx.shape, dtype=ctx.dtype, device=grad.device)
        # tokens of other ranks meet at the clamped columns, with slopes of 0
        grad_logits.index_put_((rows, local), slope.to(ctx.dtype), accumulate=True)
        return grad_logits, None, None, None, None, None, None


def _local_columns(logits: Tensor, labels: Tensor, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor]:
    """Return the labels' columns on this rank, and True for the labels that this rank has."""
    columns = logits.shape[-1]
    first = columns * (group.rank() if group is not None else 0)
    mine = (labels >= first) & (labels < first + columns)
    return (labels - first).clamp(0, columns - 1), mine


def _scaled(logits: Tensor, kind: torch.dtype, temperature: float) -> Tensor:
    """Return a copy of ``logits`` in ``kind``, divided by the temperature."""
    return logits.to(kind, copy=True).div_(temperature)


def _sums(shifted: Tensor, local: Tensor, mine: Tensor) -> Tensor:
    """Return [3, tokens]: sums of e^shifted and e^shifted x shifted, and the label's. Changes ``shifted``."""
    label = shifted.gather(-1, local[:, None])[:, 0] * mine
    weight = shifted.exp()
    return torch.stack((weight.sum(-1), shifted.mul_(weight).sum(-1), label))


def _blocks(logits: Tensor) -> Iterator[slice]:
    step = max(1, (CPU_ELEMENTS if logits.is_cpu else BLOCK_ELEMENTS) // logits.shape[-1])
    return (slice(start, start + step) for start in range(0, len(logits), step))


def _all_reduce(tensor: Tensor, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup | None) -> None:
    if group is not None and group.size() > 1:
        dist.all_reduce(tensor, op, group=group)
