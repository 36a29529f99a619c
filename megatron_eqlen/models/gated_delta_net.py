"""Gated DeltaNet (Qwen3-Next's linear attention) on token trees.

The layer is a short causal convolution and a recurrence with a matrix state,

    S_t = exp(g_t) S_{t-1} + k_t (beta_t (v_t - exp(g_t) S_{t-1}^T k_t))^T,    o_t = S_t^T q_t / sqrt(d_k)

(Yang et al., Gated Delta Networks, 2024). On a tree both go along the path: a node starts from its parent's
final state and reads its parent's last inputs in its first convolution windows. All trees of a row move
down together, level by level, so a shared prefix is computed once and gradients flow through its state.

* CPU: ``chunked_delta_rule``. Runs are cut into chunks; what happens inside a chunk does not depend on
  the state and is computed for all of them at once, so a level costs two small matrix products.
* CUDA with fla, in half precision: fla's convolution, and ``run_by_run_delta_rule``, one variable-length
  kernel call for each depth of runs.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.ssm.gated_delta_net import GatedDeltaNet
from torch import Tensor

from megatron_eqlen.megatron_cpu import packages
from megatron_eqlen.models.tree_params import KERNEL_CHUNK, Chunks, TreeParams

CHUNK = 32
"""Most positions per chunk."""


class TreeGatedDeltaNet(GatedDeltaNet):
    """Megatron's GatedDeltaNet (parameters, sharding and checkpoints) with a forward pass for token trees."""

    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int

    def _setup_variant_attrs(self) -> None:
        super()._setup_variant_attrs()
        self.gated_delta_rule: Any = tree_delta_rule  # Megatron requires fla's, which not every machine has

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        packed_seq_params: TreeParams | None = None,
        **unused: object,
    ) -> tuple[Tensor, Tensor | None]:
        """hidden_states [s (/ TP), b, h] -> the same shape, and no bias.

        ``packed_seq_params``: the trees of a row; None: b plain causal sequences.
        """
        projected, _ = self.in_proj(hidden_states)
        # [b, s, channels]; gate [b, s, heads, d]; beta and alpha [b, s, heads]
        mixed, gate, beta, alpha = self._split(projected.transpose(0, 1))
        tree = packed_seq_params or TreeParams.causal(mixed.shape[1], mixed.device)
        # [b, s, heads, d]
        out = self._mix(mixed, beta, alpha, tree)
        out = self.out_norm(out) * self.act_fn(_wide(gate)).to(out.dtype)
        # [s, b, heads * d]
        return self.out_proj(out.to(projected.dtype).flatten(2).transpose(0, 1).contiguous())

    def _split(self, projected: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """[b, s, sections] -> q|k|v [b, s, *], gate [b, s, H, d_v], beta's and decay's inputs [b, s, H]."""
        sizes = [2 * self.qk_dim + self.v_dim, self.v_dim, self.num_value_heads, self.num_value_heads]
        mixed, gate, beta, alpha = projected.split([size // self.tp_size for size in sizes], dim=-1)
        return mixed, gate.unflatten(-1, (-1, self.value_head_dim)), beta, alpha

    def _mix(self, mixed: Tensor, beta: Tensor, alpha: Tensor, tree: TreeParams) -> Tensor:
        """Convolve and recur along paths: q|k|v [b, S, *], beta and alpha [b, S, H] -> [b, S, H, d_v]."""
        # [b, S, H] log decay g, below 0
        decay = -_wide(self.A_log).exp() * F.softplus(_wide(alpha) + _wide(self.dt_bias))
        mixed = self.act_fn(tree_convolution(mixed, self.conv1d.weight, tree))
        sizes = [self.qk_dim, self.qk_dim, self.v_dim]
        query, key, value = mixed.split([size // self.tp_size for size in sizes], dim=-1)
        query, key = (_l2_norm(x.unflatten(-1, (-1, self.key_head_dim))) for x in (query, key))
        value = value.unflatten(-1, (-1, self.value_head_dim))
        return tree_delta_rule(query, key, value, decay, beta.sigmoid(), tree)


def tree_convolution(x: Tensor, weight: Tensor, tree: TreeParams) -> Tensor:
    """Causal depthwise convolution along paths. x [b, S, D], weight [D, 1, W] -> [b, S, D]. One runs over the
    row as it lies; positions after a fork or a tree's start are recomputed on their own windows."""
    width = weight.shape[-1]
    flat = _row_convolution(x, weight)
    at, windows = tree.seams(width)
    if not len(at):
        return flat
    padded = F.pad(x, (0, 0, 0, 1))  # position S: zeros, before a path's start
    seams = torch.einsum("bmwd,dw->bmd", padded[:, windows], weight.squeeze(1))
    return flat.index_copy(1, at, seams)


def _row_convolution(x: Tensor, weight: Tensor) -> Tensor:
    """Return the causal depthwise convolution along the row, ignoring trees."""
    if x.is_cuda and (kernel := fla_convolution(x.dtype)):
        return kernel(x, weight.squeeze(1))[0]
    padded = F.pad(x.transpose(1, 2), (weight.shape[-1] - 1, 0))
    return F.conv1d(padded, weight, groups=weight.shape[0]).transpose(1, 2)


def tree_delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, tree: TreeParams) -> Tensor:
    """Compute the recurrence along every path. q, k [b, S, K, d_k] with unit length, v [b, S, H, d_v], log
    decay g and beta [b, S, H] -> [b, S, H, d_v] in v's dtype. Each key head serves H / K value heads."""
    if q.is_cuda and q.shape[0] == 1 and (kernel := fla_kernel(v.dtype)):
        return run_by_run_delta_rule(q.to(v.dtype), k.to(v.dtype), v, g, beta, tree, kernel)
    return chunked_delta_rule(q, k, v, g, beta, tree)


def chunked_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, tree: TreeParams, size: int | None = None
) -> Tensor:
    """Compute the recurrence in torch, in at least float32, by chunks of ``size``, or as runs are long.

    Within a chunk, with G_t the sum of its g up to t and S its state at the start, the values w that are
    written to the state solve a triangular system:
    w_t = beta_t (v_t - exp(G_t) S^T k_t - sum over s < t of exp(G_t - G_s) (k_t . k_s) w_s).
    """
    q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], dim=2) for x in (q, k))  # [b, S, H, d_k]
    size = size or tree.chunk_size(CHUNK)
    chunks = tree.chunks(size)
    # all [n, b, H, size, d]; d = 1 for g and beta
    q, k, v_, g, beta = (
        _to_chunks(_wide(x), chunks.positions, size) for x in (q, k, v, g[..., None], beta[..., None])
    )
    g = g.squeeze(-1).cumsum(-1)  # G: [n, b, H, size]
    upper = torch.ones(size, size, dtype=torch.bool, device=g.device).triu(1)
    # exp(G_t - G_s) for s <= t, else 0: [n, b, H, size, size]
    decay = (g[..., :, None] - g[..., None, :]).masked_fill(upper, float("-inf")).exp()
    among_keys = (k * beta) @ k.mT * decay  # the system below its diagonal, which counts as ones
    # w = new - read S: new [.., size, d_v], read [.., size, d_k]
    new, read = torch.linalg.solve_triangular(
        among_keys,
        torch.cat((v_ * beta, k * beta * g[..., None].exp()), dim=-1),
        upper=False,
        unitriangular=True,
    ).split([v.shape[-1], k.shape[-1]], dim=-1)
    q = q * q.shape[-1] ** -0.5
    within = q @ k.mT * decay  # what o_t reads of w_s, s <= t, in its own chunk: [.., size, size]
    reads = torch.cat((read, q * g[..., None].exp()), dim=-2)  # both of S, in one product: [.., 2 size, d_k]
    writes = (k * (g[..., -1:] - g)[..., None].exp()).mT  # what is left of k_t at the end: [.., d_k, size]
    written, from_state = _scan_levels(new, reads, writes, g[..., -1].exp()[..., None, None], chunks)
    out = from_state + within @ written  # [.., size, d_v]
    # [b, n * size, H, d_v], then the row's own order
    return out.permute(1, 0, 3, 2, 4).flatten(1, 2).index_select(1, chunks.slots).to(v.dtype)


def _scan_levels(
    new: Tensor, reads: Tensor, writes: Tensor, keep: Tensor, chunks: Chunks
) -> tuple[Tensor, Tensor]:
    """Pass the state from each chunk to its children. All [n, b, H, *, *], chunks sorted by level. Returns
    the values written to the state and those read from it at a chunk's start: both [.., size, d_v]."""
    size = new.shape[-2]
    state = None
    written, outputs = [], []
    per_level = (x.split(chunks.levels) for x in (new, reads, writes, keep))
    for level, (new_, reads_, writes_, keep_) in enumerate(zip(*per_level, strict=True)):
        if state is None:
            written.append(new_)
            outputs.append(torch.zeros_like(new_))
        else:
            state = state.index_select(0, chunks.parents[level])  # each chunk starts from its parent's end
            removed, output = (reads_ @ state).split(size, dim=-2)  # each [m, b, H, size, d_v]
            written.append(new_ - removed)
            outputs.append(output)
        if level + 1 < len(chunks.levels):
            # [m, b, H, d_k, d_v] state after each chunk with children: before it, decayed, and its own writes
            with_children = chunks.with_children[level]
            added = writes_[:with_children] @ written[-1][:with_children]
            state = added if state is None else added + keep_[:with_children] * state[:with_children]
    return torch.cat(written), torch.cat(outputs)


def _to_chunks(x: Tensor, positions: Tensor, size: int) -> Tensor:
    """[b, S, H, d] -> [n, b, H, size, d]; filling slots are zero and neither decay nor write the state."""
    padded = F.pad(x, (0, 0, 0, 0, 0, 1))
    return padded.index_select(1, positions).unflatten(1, (-1, size)).permute(1, 0, 3, 2, 4)


def run_by_run_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, tree: TreeParams, kernel: Callable
) -> Tensor:
    """Compute the recurrence with ``kernel``, called as fla's is: once for each depth of runs."""
    outputs, state = [], None  # state: [runs of the level before, H, d_k, d_v], at their ends
    for depth, level in enumerate(tree.run_levels):
        last = depth + 1 == len(tree.run_levels)
        out, state = kernel(
            *(x.index_select(1, level.positions) for x in (q, k, v)),
            g=g.index_select(1, level.positions),
            beta=beta.index_select(1, level.positions),
            initial_state=None if state is None else state.index_select(0, level.parents),
            output_final_state=not last,
            cu_seqlens=level.cu_seqlens,
            chunk_indices=level.chunk_indices,
            chunk_size=KERNEL_CHUNK,
        )
        outputs.append(out)
    order = torch.cat([level.positions for level in tree.run_levels])
    return torch.zeros_like(v).index_copy(1, order, torch.cat(outputs, dim=1).to(v.dtype))


@cache
def fla_kernel(dtype: torch.dtype) -> Callable | None:
    """Return fla's chunked kernel if it imports and computes in ``dtype``; else log once and return None."""
    if dtype not in (torch.bfloat16, torch.float16):
        text = f"Gated DeltaNet runs in plain torch on this GPU, slowly: fla does not compute in {dtype}"
        warnings.warn(text, stacklevel=2)
        return None
    if not packages.usable(packages.FLA):
        return None
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule  # pyright: ignore[reportMissingImports] (GPU only)

    return chunk_gated_delta_rule


@cache
def fla_convolution(dtype: torch.dtype) -> Callable | None:
    """Return fla's causal convolution if ``fla_kernel`` is available."""
    if fla_kernel(dtype) is None:
        return None
    from fla.modules.causal_conv1d import causal_conv1d  # pyright: ignore[reportMissingImports] (GPU only)

    return causal_conv1d  # pyright: ignore[reportReturnType] (as fla's decorator has it)


def _wide(x: Tensor) -> Tensor:
    """Return ``x`` in float32, or in its own dtype if that is wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _l2_norm(x: Tensor) -> Tensor:
    wide = _wide(x)
    return wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + 1e-6)
