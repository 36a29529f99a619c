"""Attention on token trees on CPUs: dense parts without a mask, each at the speed of torch's flash kernel.

Each chain is causal in itself and sees all of its prefix. The first call computes the attention of every
chain to itself, the following calls its attention to the first span of its prefix, the second, and so on. The
prefixes of a caterpillar or a star are one span: two calls. The results of two calls are merged by their
log-sum-exp, and each call's backward pass is the kernel's own, given the merged output and log-sum-exp, as in
ring attention (Liu et al., arXiv 2310.01889): probabilities are exp(score - log-sum-exp), so the calls'
gradients add up. The backward pass computes in at least float32: on short chains torch's kernel takes five
times as long in bfloat16 (145 ms in place of 28 for 1,162 tokens in chains of 45, 9 heads of 64), and on a
chain of 8,192 as long.

Here q and outputs are [S, heads, d], k and v [S, groups, d], log-sum-exps [heads, S]; with context
parallelism [s, heads, d], [K, groups, d] and [heads, s], of a rank's positions and of the keys that they see.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_eqlen.models.tree_params import TreeParams


def merged_attention(q: Tensor, k: Tensor, v: Tensor, tree: TreeParams, scale: float) -> Tensor:
    """Return [S, heads, d] in the dtype of ``q``. Accumulates in at least float32."""
    return _Merged.apply(q, k, v, tree, scale)


class _Merged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, tree: TreeParams, scale: float) -> Tensor:
        attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        wide = torch.promote_types(q.dtype, torch.float32)
        out, lse = q.new_empty(q.shape, dtype=wide), q.new_empty(q.shape[1::-1], dtype=wide)
        for number, call in enumerate(tree.calls):
            for queries, keys in call.pairs:
                inputs = [_bhsd(x) for x in (q[queries], k[keys], v[keys])]
                # [1, heads, s, d] and [1, heads, s], as if these keys were all
                part, part_lse = attend(*inputs, 0.0, call.causal, scale=scale)
                if number == 0:
                    out[queries], lse[:, queries] = _shd(part), part_lse[0]
                else:
                    _merge(out[queries], lse[:, queries], _shd(part), part_lse[0])
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.tree, ctx.scale = tree, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        lse = ctx.saved_tensors[-1]
        grad, q, k, v, out = (x.to(lse.dtype) for x in (grad, *ctx.saved_tensors[:-1]))
        sums = [torch.zeros_like(x) for x in (q, k, v)]  # of the calls' parts
        for call in ctx.tree.calls:
            for queries, keys in call.pairs:
                inputs = map(_bhsd, (grad[queries], q[queries], k[keys], v[keys], out[queries]))
                parts = gradients(*inputs, lse[None, :, queries], 0.0, call.causal, scale=ctx.scale)
                for total, at, part in zip(sums, (queries, keys, keys), parts, strict=True):
                    total[at].add_(_shd(part))
        dq, dk, dv = (total.to(ctx.saved_tensors[0].dtype) for total in sums)
        return dq, dk, dv, None, None


def _merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Merge a part in place, as if all keys had been seen in one call."""
    both = torch.logaddexp(lse, part_lse)  # [heads, s]; each output's weight is exp(its lse - both)
    out.mul_((lse - both).exp_().T[..., None]).addcmul_((part_lse - both).exp_().T[..., None], part)
    lse.copy_(both)


def _bhsd(x: Tensor) -> Tensor:
    """[s, heads, d] -> [1, heads, s, d]"""
    return x.transpose(0, 1)[None]


def _shd(x: Tensor) -> Tensor:
    """[1, heads, s, d] -> [s, heads, d]"""
    return x[0].transpose(0, 1)
