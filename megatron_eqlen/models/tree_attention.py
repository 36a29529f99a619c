"""Core attention on token trees: position k is visible to position q iff k <= q < visible_until[k].

Two implementations of the same rule:

* CPUs: ``merged_attention``, dense parts without a mask, each at the speed of torch's flash kernel. Each
  chain is causal in itself and sees all of its prefix. The first call computes the attention of every chain
  to itself, the following calls its attention to the first span of its prefix, the second, and so on (the
  prefixes of a caterpillar or a star are one span: two calls). The results of two calls are merged by their
  log-sum-exp, and each call's backward pass is the kernel's own, given the merged output and log-sum-exp, as
  in ring attention (Liu et al., arXiv 2310.01889): probabilities are exp(score - log-sum-exp), so the calls'
  gradients add up. The backward pass computes in at least float32: on short chains torch's kernel takes five
  times as long in bfloat16 (145 ms in place of 28 for 1,162 tokens in chains of 45, 9 heads of 64), and on a
  chain of 8,192 as long.
* GPUs: FlexAttention. The blocks of keys that a block of queries sees, fully or partially, follow from
  the smallest and largest ``visible_until`` of each block, so the mask costs (S / 128)^2. One compiled kernel
  serves rows of whole blocks, as in training; another serves all other rows. Its kernels are Triton's, or
  with ``model.megatron: {attention_backend: flash}`` those of ``flash_attn.cute``. No start measures
  them: a resumed run must choose as the first start did.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any, cast

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnBackend, AttnMaskType
from megatron.core.transformer.module import MegatronModule
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from megatron_eqlen.models.tree_params import TreeParams

BLOCK = 128
"""Size of FlexAttention's blocks of queries and keys."""


class TreeAttention(MegatronModule):
    """Megatron's core attention for token trees, or plain causal sequences without ``packed_seq_params``.
    Grouped query attention, any head size; tensor parallelism splits the heads outside. No parameters."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__(config=config)
        if dropout := attention_dropout or config.attention_dropout:
            raise ValueError(f"attention_dropout: expected 0, found {dropout}")
        assert config.kv_channels is not None
        self.scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)
        # a recipe's text, or Megatron's enumeration
        self.flash = config.attention_backend in ("flash", AttnBackend.flash)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """query [s, b, heads, d], key and value [s, b, groups, d] -> [s, b, heads * d].

        ``packed_seq_params``: a row's ``TreeParams``, b = 1; None: b plain causal sequences.
        ``attention_mask`` is not read: the trees are the mask.
        """
        assert attention_bias is None, "token trees have no attention bias"
        # [b, heads or groups, s, d]
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        if packed_seq_params is None:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale, enable_gqa=True)
        else:
            assert isinstance(packed_seq_params, TreeParams)
            assert query.shape[1] == 1, f"a row of trees is a batch of one, found {query.shape[1]}"
            out = tree_attention(q, k, v, packed_seq_params, self.scale, self.flash)
        return out.permute(2, 0, 1, 3).flatten(2)


def tree_attention(
    q: Tensor, k: Tensor, v: Tensor, tree: TreeParams, scale: float, flash: bool = False
) -> Tensor:
    """q [1, heads, S, d], k and v [1, groups, S, d] -> [1, heads, S, d]."""
    if q.is_cuda:
        return flex_tree_attention(q, k, v, tree, scale, flash)
    q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
    return merged_attention(q, k, v, tree, scale).transpose(0, 1)[None]


def merged_attention(q: Tensor, k: Tensor, v: Tensor, tree: TreeParams, scale: float) -> Tensor:
    """q and the result [S, heads, d], k and v [S, groups, d]. Accumulates in at least float32."""
    return _Merged.apply(q, k, v, tree, scale)


class _Merged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, tree: TreeParams, scale: float) -> Tensor:
        attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        wide = torch.promote_types(q.dtype, torch.float32)
        # [S, heads, d] and [heads, S]: the merged parts so far
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


def flex_tree_attention(
    q: Tensor, k: Tensor, v: Tensor, tree: TreeParams, scale: float, flash: bool = False
) -> Tensor:
    """Compute the row with one FlexAttention call. ``flash``: with FlexAttention's FLASH backend."""
    if tree.block_mask is None:
        tree.block_mask = tree_block_mask(tree.visible_until)
    compiled = _compiled_flex_attention(len(tree) % BLOCK == 0)
    options = {"BACKEND": "FLASH"} if flash else _kernel_options(q)
    return compiled(q, k, v, block_mask=tree.block_mask, scale=scale, enable_gqa=True, kernel_options=options)


def _kernel_options(q: Tensor) -> dict[str, int] | None:
    """Return eight warps for a backward pass in which torch's four lack registers: at head sizes above 128,
    and at 128 on B200, each thread would spill 1.7 to 14 KB (``docs/gpu.md``)."""
    if not q.is_cuda:
        return None
    most = 128 if torch.cuda.get_device_capability(q.device) < (10, 0) else 64
    return {"bwd_num_warps": 8} if q.shape[-1] > most else None


@cache
def _compiled_flex_attention(whole_blocks: bool) -> Callable[..., Tensor]:
    return torch.compile(whole_block_attention if whole_blocks else flex_attention, dynamic=True)


def whole_block_attention(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """``flex_attention`` with the hint, for any S, that no block is cut: its kernel then checks no edges."""
    torch._check(q.shape[2] % BLOCK == 0)
    torch._check(k.shape[2] % BLOCK == 0)
    return cast(Tensor, flex_attention(q, k, v, **options))


def tree_block_mask(visible_until: Tensor) -> BlockMask:
    """Return FlexAttention's block mask of a row, from ``visible_until`` [S] alone, on its device."""
    partial, full = block_visibility(visible_until)

    def visible(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (k <= q) & (q < visible_until[k])

    lengths = (len(visible_until), len(visible_until))
    return BlockMask.from_kv_blocks(
        *_listed(partial), *_listed(full), BLOCK_SIZE=BLOCK, mask_mod=visible, seq_lengths=lengths
    )


def block_visibility(visible_until: Tensor) -> tuple[Tensor, Tensor]:
    """Return the blocks of keys that a block of queries sees partially, and those it sees fully: two [n, n]
    bool. A block sees itself partially and no later one. It sees an earlier block of keys if the largest
    ``visible_until`` there lies beyond its first query, and fully if the smallest lies beyond its last."""
    length = len(visible_until)
    blocks = -(-length // BLOCK)
    reach = F.pad(visible_until, (0, blocks * BLOCK - length)).view(blocks, BLOCK)  # 0: never visible
    first_query = torch.arange(blocks, device=visible_until.device)[:, None] * BLOCK  # [n, 1]
    earlier = first_query > first_query.T  # [n, n], like all below: blocks of queries x of keys
    seen = earlier & (reach.amax(1) > first_query)
    full = earlier & (reach.amin(1) >= first_query + BLOCK)
    own = torch.eye(blocks, dtype=torch.bool, device=visible_until.device)
    return own | (seen & ~full), full


def _listed(seen: Tensor) -> tuple[Tensor, Tensor]:
    """[n, m] bool -> number of seen blocks per row [1, 1, n], and their indices first [1, 1, n, m], int32."""
    counts = seen.sum(dim=1, dtype=torch.int32)
    numbers = torch.argsort(~seen, dim=1, stable=True).to(torch.int32)
    return counts[None, None], numbers[None, None]
