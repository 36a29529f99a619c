"""Attention on token trees with dense kernels only: no mask, every part at a flash kernel's speed.

Each chain is causal in itself and sees all of its prefix. The first call computes the attention of every
chain to itself, the following calls its attention to the first span of its prefix, the second, and so on. The
prefixes of a caterpillar or a star are one span: two calls. The results of two calls are merged by their
log-sum-exp, and each call's backward pass is the kernel's own, given the merged output and log-sum-exp, as in
ring attention (Liu et al., arXiv 2310.01889): probabilities are exp(score - log-sum-exp), so the calls'
gradients add up.

Here q and outputs are [S, heads, d], k and v [S, groups, d], log-sum-exps [heads, S]; with context
parallelism [s, heads, d], [K, groups, d] and [heads, s], of a rank's positions and of the keys that they see.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from megatron_eqlen.models.tree_params import Call, TreeParams

Forward = tuple[slice, Tensor, Tensor]
"""Queries, their output and log-sum-exp."""
Backward = tuple[slice, slice, Tensor, Tensor, Tensor]
"""Queries, keys, the gradients of q, k and v."""


class Inputs(NamedTuple):
    """Inputs for a whole row."""

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float


class Seen(NamedTuple):
    """Merged result of all calls for the row's queries."""

    out: Tensor
    lse: Tensor


class Kernel(Protocol):
    """Flash kernel for all pairs of a call, each dense or causal."""

    def forward(self, row: Inputs, call: Call) -> Iterator[Forward]: ...

    def backward(self, grad: Tensor, row: Inputs, seen: Seen, call: Call) -> Iterator[Backward]: ...


def merged_attention(
    q: Tensor, k: Tensor, v: Tensor, tree: TreeParams, scale: float, kernel: Kernel
) -> Tensor:
    """Return [S, heads, d] in the dtype of ``q``. Accumulates in at least float32."""
    return _Merged.apply(q, k, v, tree, scale, kernel)


class _Merged(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, tree: TreeParams, scale: float, kernel: Kernel
    ) -> Tensor:
        wide = torch.promote_types(q.dtype, torch.float32)
        out, lse = q.new_empty(q.shape, dtype=wide), q.new_empty(q.shape[1::-1], dtype=wide)
        for number, call in enumerate(tree.calls):
            for queries, part, part_lse in kernel.forward(Inputs(q, k, v, scale), call):
                if number == 0:
                    out[queries], lse[:, queries] = part, part_lse
                else:
                    _merge(out[queries], lse[:, queries], part, part_lse)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.tree, ctx.scale, ctx.kernel = tree, scale, kernel
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        q, k, v, out, lse = ctx.saved_tensors
        row, seen = Inputs(q, k, v, ctx.scale), Seen(out, lse)
        sums = [torch.zeros_like(x, dtype=lse.dtype) for x in (q, k, v)]
        for call in ctx.tree.calls:
            for queries, keys, *parts in ctx.kernel.backward(grad, row, seen, call):
                for total, at, part in zip(sums, (queries, keys, keys), parts, strict=True):
                    total[at].add_(part)
        dq, dk, dv = (total.to(q.dtype) for total in sums)
        return dq, dk, dv, None, None, None


def _merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Merge a part in place, as if all keys had been seen in one call."""
    both = torch.logaddexp(lse, part_lse)
    out.mul_((lse - both).exp_().T[..., None]).addcmul_((part_lse - both).exp_().T[..., None], part)
    lse.copy_(both)


class CpuKernel:
    """torch's flash attention for CPUs, pair by pair, without copies."""

    def forward(self, row: Inputs, call: Call) -> Iterator[Forward]:
        attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        for queries, keys in call.pairs:
            inputs = [_bhsd(x) for x in (row.q[queries], row.k[keys], row.v[keys])]
            out, lse = attend(*inputs, 0.0, call.causal, scale=row.scale)
            yield queries, _shd(out), lse[0]

    def backward(self, grad: Tensor, row: Inputs, seen: Seen, call: Call) -> Iterator[Backward]:
        gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        for queries, keys in call.pairs:
            parts = (grad[queries], row.q[queries], row.k[keys], row.v[keys], seen.out[queries])
            lse = seen.lse[None, :, queries]
            found = gradients(*map(_bhsd, parts), lse, 0.0, call.causal, scale=row.scale)
            dq, dk, dv = map(_shd, found)
            yield queries, keys, dq, dk, dv


def _bhsd(x: Tensor) -> Tensor:
    """[s, heads, d] -> [1, heads, s, d]"""
    return x.transpose(0, 1)[None]


def _shd(x: Tensor) -> Tensor:
    """[1, heads, s, d] -> [s, heads, d]"""
    return x[0].transpose(0, 1)


@dataclass(frozen=True)
class FlashKernel:
    """torch's FlashAttention 2, one kernel per call: float16 or bfloat16, heads of up to 256. A prefix's keys
    are copied for each chain that sees them."""

    attend: Callable[..., Any] = torch.ops.aten._flash_attention_forward
    gradients: Callable[..., Any] = torch.ops.aten._flash_attention_backward

    def forward(self, row: Inputs, call: Call) -> Iterator[Forward]:
        queries, keys = zip(*call.pairs, strict=True)
        inputs = [_joined(row.q, queries), _joined(row.k, keys), _joined(row.v, keys)]
        out, lse, *_ = self.attend(*inputs, *call.varlen, 0.0, call.causal, False, scale=row.scale)
        sizes = _sizes(queries)
        yield from zip(queries, out.split(sizes), lse.split(sizes, dim=1), strict=True)

    def backward(self, grad: Tensor, row: Inputs, seen: Seen, call: Call) -> Iterator[Backward]:
        queries, keys = zip(*call.pairs, strict=True)
        inputs = [
            _joined(grad, queries), _joined(row.q, queries), _joined(row.k, keys), _joined(row.v, keys),
            _joined(seen.out, queries), _joined(seen.lse.T, queries).T.contiguous(),
        ]  # fmt: skip
        device = grad.device
        no_dropout = torch.zeros(2, dtype=torch.uint64, device=device), torch.empty(0, device=device)
        dq, dk, dv = self.gradients(*inputs, *call.varlen, 0.0, call.causal, *no_dropout, scale=row.scale)
        of_keys = (x.split(_sizes(keys)) for x in (dk, dv))
        yield from zip(queries, keys, dq.split(_sizes(queries)), *of_keys, strict=True)


def _joined(x: Tensor, spans: tuple[slice, ...]) -> Tensor:
    """Return the concatenated spans of ``x``; spans that are adjacent in ``x`` are not copied."""
    ends = [span.stop for span in spans[:-1]]
    if ends == [span.start for span in spans[1:]]:
        return x[spans[0].start : spans[-1].stop].contiguous()
    return torch.cat([x[span] for span in spans])


def _sizes(spans: tuple[slice, ...]) -> list[int]:
    return [span.stop - span.start for span in spans]
